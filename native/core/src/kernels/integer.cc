// Integer means: the elements widened to int64, summed by Reduce, and divided back.
#include <cstring>

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
  switch (dtype) {
    case DDL_INT32:
      return Widen<int32_t>(in, out, count);
    case DDL_INT64:
      return Widen<int64_t>(in, out, count);
    case DDL_UINT8:
      return Widen<uint8_t>(in, out, count);
    case DDL_INT8:
      return Widen<int8_t>(in, out, count);
    default:
      return;
  }
}

void DivideFromInt64(ddl_dtype dtype, const int64_t* in, void* out, size_t count, int64_t divisor) {
  switch (dtype) {
    case DDL_INT32:
      return Divide<int32_t>(in, out, count, divisor);
    case DDL_INT64:
      return Divide<int64_t>(in, out, count, divisor);
    case DDL_UINT8:
      return Divide<uint8_t>(in, out, count, divisor);
    case DDL_INT8:
      return Divide<int8_t>(in, out, count, divisor);
    default:
      return;
  }
}

}  // namespace ddl
