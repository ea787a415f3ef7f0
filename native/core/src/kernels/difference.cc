// How far two results are apart: DDL_FLAG_CHECK.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/kernels.h"

namespace ddl {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Difference(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  if (!std::isfinite(a) || !std::isfinite(b)) return kInfinity;
  const double scale = std::max(1.0, std::fabs(b));
  const double difference = std::fabs(a - b);
  if (std::isfinite(difference)) return difference / scale;
  return std::fabs(a / scale - b / scale);  // a - b overflows, the quotient does not
}

// A double cannot hold every int64; their distance without sign is exact.
double Difference(int64_t a, int64_t b) {
  const uint64_t distance =
      a > b ? static_cast<uint64_t>(a) - static_cast<uint64_t>(b) : static_cast<uint64_t>(b) - static_cast<uint64_t>(a);
  return static_cast<double>(distance) / std::max(1.0, std::fabs(static_cast<double>(b)));
}

template <typename T>
auto Widened(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<double>(value);
  } else {
    return static_cast<double>(value.ToFloat());
  }
}

template <typename T>
double Largest(const void* a, const void* b, size_t count) {
  double largest = 0;
  for (size_t i = 0; i < count; ++i) {
    T x, y;
    std::memcpy(&x, static_cast<const char*>(a) + i * sizeof(T), sizeof(T));
    std::memcpy(&y, static_cast<const char*>(b) + i * sizeof(T), sizeof(T));
    largest = std::max(largest, Difference(Widened(x), Widened(y)));
  }
  return largest;
}

}  // namespace

double MaxRelativeDifference(ddl_dtype dtype, const void* a, const void* b, size_t count) {
  double largest = kInfinity;
  WithDtype(dtype, [&](auto element, const char*) { largest = Largest<decltype(element)>(a, b, count); });
  return largest;
}

}  // namespace ddl
