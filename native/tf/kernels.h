// kernels.h: the functions that TensorFlow calls to make, run and free kernels.
#ifndef KERAS_DDL_TF_KERNELS_H_
#define KERAS_DDL_TF_KERNELS_H_

#include "tf_c_api.h"

namespace keras_ddl::tf {

struct KernelFunctions {
  void* (*create)(TF_OpKernelConstruction*);         // all tensors are in the host's memory
  void* (*create_on_gpu)(TF_OpKernelConstruction*);  // those of dtype `T` are in a GPU's memory
  // Returns at once; TensorFlow's threads are free while ranks wait for each other.
  void (*compute_async)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
  // Returns when the outputs have been set.
  void (*compute_sync)(void*, TF_OpKernelContext*);
  void (*destroy)(void*);
};

KernelFunctions AllReduceKernel();
KernelFunctions BroadcastKernel();
KernelFunctions ReduceScatterKernel();
KernelFunctions AllGatherKernel();
KernelFunctions AllToAllKernel();

}  // namespace keras_ddl::tf

#endif  // KERAS_DDL_TF_KERNELS_H_
