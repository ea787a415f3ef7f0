// gpu_stream.h: what TensorFlow's C API does not tell about a GPU.
#ifndef KERAS_DDL_TF_GPU_STREAM_H_
#define KERAS_DDL_TF_GPU_STREAM_H_

#include "ddl.h"
#include "tf_c_api.h"

// Returns the CUstream on which TensorFlow computes the inputs in `context`; NULL: not known. *ordinal: CUDA's number
// of the GPU in this process. Any thread. In a library for one version of TensorFlow, which Python loads before this
// one (keras_ddl/compat/gpu_stream.py). Without it, the address of this function is NULL.
extern "C" DDL_EXPORT __attribute__((weak)) void* keras_ddl_gpu_stream(TF_OpKernelContext* context, int* ordinal);

#endif  // KERAS_DDL_TF_GPU_STREAM_H_
