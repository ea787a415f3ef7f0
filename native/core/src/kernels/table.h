// The kernels that exist once per instruction set. Internal to kernels*.cc.
#ifndef KERAS_DDL_CORE_KERNELS_TABLE_H_
#define KERAS_DDL_CORE_KERNELS_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "ddl.h"

namespace ddl {

struct KernelTable {
  // n >= 2, or n >= 1 for means of floating dtypes; everything else as in kernels.h.
  using ReduceFunction = void (*)(const uint8_t* const* in, int n, uint8_t* out, size_t bytes, double divisor,
                                  bool streaming);
  const char* name;
  ReduceFunction reduce[DDL_NUM_DTYPES][DDL_ADASUM];  // the operations before it
  void (*copy)(uint8_t* out, const uint8_t* in, size_t bytes);
  void (*stream_copy)(uint8_t* out, const uint8_t* in, size_t bytes);
  // narrow.h; of bfloat16, then float16
  void (*narrow[2])(const float* in, float scale, uint8_t* out, float unit, float* error, size_t count);
  void (*widen[2])(const uint8_t* in, float factor, float* out, size_t count, bool adds);
  float (*largest_finite)(const float* in, size_t count);
  // See adaptive_sum.h. [0]: float32, [1]: float64
  void (*add_dots[2])(const uint8_t* a, const uint8_t* b, size_t count, double* dots);
  void (*combine[2])(uint8_t* a, const uint8_t* b, size_t count, double share_a, double share_b);
};

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;    // needs AVX2 and F16C
extern const KernelTable kAvx512Kernels;  // needs AVX-512 F, BW, DQ and VL
#endif

}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_TABLE_H_
