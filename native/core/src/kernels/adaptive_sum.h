// The arithmetic of the adaptive sum of two vectors (Maleki et al., arXiv 2006.02924, 2020):
//   (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
// which is their sum if they are orthogonal and their mean if they are equal. Vectors are float32 or float64 here;
// 16-bit floats are widened to float32 first. Products are summed in float64 in a fixed order, the same under every
// instruction set.
#ifndef KERAS_DDL_CORE_KERNELS_ADAPTIVE_SUM_H_
#define KERAS_DDL_CORE_KERNELS_ADAPTIVE_SUM_H_

#include <cstddef>

#include "ddl.h"

namespace ddl {

// Products of two vectors, or of a rank's parts of them. The products of complete vectors are the sums over their
// parts.
struct Dots {
  double ab = 0;
  double aa = 0;
  double bb = 0;
};

// The dtype in which vectors of `dtype` are combined: float64, or float32 for all others. REQUIRES: IsFloating(dtype).
constexpr ddl_dtype WideDtype(ddl_dtype dtype) { return dtype == DDL_FLOAT64 ? DDL_FLOAT64 : DDL_FLOAT32; }

// `wide`: DDL_FLOAT32 or DDL_FLOAT64. No alignment is needed.
void AddDots(ddl_dtype wide, const void* a, const void* b, size_t count, Dots* dots);
// a = the adaptive sum of a and b, whose products over the whole vectors are `dots`. A vector of zeros changes nothing.
void Combine(ddl_dtype wide, void* a, const void* b, size_t count, const Dots& dots);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_ADAPTIVE_SUM_H_
