#include "kernels/adaptive_sum.h"

#include <cstdint>

#include "kernels/instruction_set.h"

namespace ddl {
namespace {

size_t IndexOf(ddl_dtype dtype) { return dtype == DDL_FLOAT64 ? 1 : 0; }

// a.b / 2|x|^2; 0 for a vector of zeros, which has no direction.
double Projection(double ab, double xx) { return xx == 0 ? 0 : ab / (2 * xx); }

}  // namespace

void AddDots(ddl_dtype wide, const void* a, const void* b, size_t count, Dots* dots) {
  const DefaultFloatMode mode;
  double sums[3];
  Kernels().add_dots[IndexOf(wide)](static_cast<const uint8_t*>(a), static_cast<const uint8_t*>(b), count, sums);
  dots->ab += sums[0];
  dots->aa += sums[1];
  dots->bb += sums[2];
}

void Combine(ddl_dtype wide, void* a, const void* b, size_t count, const Dots& dots) {
  const DefaultFloatMode mode;
  Kernels().combine[IndexOf(wide)](static_cast<uint8_t*>(a), static_cast<const uint8_t*>(b), count,
                                   1 - Projection(dots.ab, dots.aa), 1 - Projection(dots.ab, dots.bb));
}

}  // namespace ddl
