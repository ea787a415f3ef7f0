#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/kernels.h"

namespace ddl {
namespace {

// Returns the neutral element of an op. T: int32_t, float, ...; for 16-bit floats the type of the computation.
template <typename T>
T Neutral(ddl_op op) {
  using Limits = std::numeric_limits<T>;
  if (op == DDL_PRODUCT) return T{1};
  if (op == DDL_MIN) return Limits::has_infinity ? Limits::infinity() : Limits::max();
  if (op == DDL_MAX) return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  return T{0};
}

}  // namespace

void FillNeutral(ddl_dtype dtype, ddl_op op, void* out, size_t count) {
  WithDtype(dtype, [&](auto element, const char*) {
    using T = decltype(element);
    if constexpr (std::is_arithmetic_v<T>) {
      element = Neutral<T>(op);
    } else {
      element = T::FromFloat(Neutral<float>(op));
    }
    std::fill_n(static_cast<T*>(out), count, element);
  });
}

}  // namespace ddl
