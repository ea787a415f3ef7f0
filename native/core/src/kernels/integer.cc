// Integer means: the elements widened to int64, summed by Reduce, and divided back.
#include <cstring>
#include <type_traits>

#include "kernels/kernels.h"

namespace ddl {
namespace {

template <typename T>
void Widen(const void* in, int64_t* out, size_t count) {
  const char* const from = static_cast<const char*>(in);
  for (size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));  // `in` need not be aligned
    const int64_t widened = value;
    std::memcpy(reinterpret_cast<char*>(out) + i * sizeof(int64_t), &widened, sizeof widened);
  }
}

template <typename T>
void Divide(const int64_t* in, void* out, size_t count, int64_t divisor) {
  char* const to = static_cast<char*>(out);
  for (size_t i = 0; i < count; ++i) {
    int64_t sum;
    std::memcpy(&sum, reinterpret_cast<const char*>(in) + i * sizeof sum, sizeof sum);
    const T value = static_cast<T>(sum / divisor);
    std::memcpy(to + i * sizeof(T), &value, sizeof(T));
  }
}

}  // namespace

void WidenToInt64(ddl_dtype dtype, const void* in, int64_t* out, size_t count) {
  WithDtype(dtype, [&](auto element, const char*) {
    if constexpr (std::is_integral_v<decltype(element)>) Widen<decltype(element)>(in, out, count);
  });
}

void DivideFromInt64(ddl_dtype dtype, const int64_t* in, void* out, size_t count, int64_t divisor) {
  WithDtype(dtype, [&](auto element, const char*) {
    if constexpr (std::is_integral_v<decltype(element)>) Divide<decltype(element)>(in, out, count, divisor);
  });
}

}  // namespace ddl
