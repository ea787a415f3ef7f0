// ddl_cuda.h: a CUDA device for ddl_add_device.
#ifndef KERAS_DDL_DDL_CUDA_H_
#define KERAS_DDL_DDL_CUDA_H_

#include "ddl_device.h"

#ifdef __cplusplus
extern "C" {
#endif

// Fills in *out for device `ordinal` in CUDA's numbering of this process's devices. It uses the primary context, which
// the CUDA runtime and hence PyTorch and TensorFlow use, too. With `library` it also looks for NCCL, without which the
// table has no collectives. If CUDA's driver or the device is missing, returns DDL_UNAVAILABLE and writes the reason
// into `error`.
DDL_EXPORT int ddl_cuda_open(int ordinal, int library, ddl_device* out, char* error, size_t error_bytes);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // KERAS_DDL_DDL_CUDA_H_
