// ddl_cuda.h: a device of CUDA for ddl_add_device.
#ifndef KERAS_DDL_DDL_CUDA_H_
#define KERAS_DDL_DDL_CUDA_H_

#include "ddl_device.h"

#ifdef __cplusplus
extern "C" {
#endif

// Fills in *out for device `ordinal`, as CUDA numbers this process's devices, with its primary context: that of the
// CUDA runtime, hence of PyTorch and TensorFlow. With `library` it also looks for NCCL, without which the table has no
// collectives. Returns DDL_UNAVAILABLE where CUDA's driver or the device is not there, and writes why into `error`.
DDL_EXPORT int ddl_cuda_open(int ordinal, int library, ddl_device* out, char* error, size_t error_bytes);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // KERAS_DDL_DDL_CUDA_H_
