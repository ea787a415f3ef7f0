// The element types: native/'s only table of them, in the order of ddl.h. The Python layer's table is
// keras_ddl/communicator/native/dtypes.py. A test checks that both are equal.
#ifndef KERAS_DDL_COMMON_DTYPES_H_
#define KERAS_DDL_COMMON_DTYPES_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/half.h"
#include "ddl.h"

// X(ddl_dtype, the Python layer's name, type of an element)
#define DDL_FOR_EACH_DTYPE(X)                \
  X(DDL_FLOAT32, "float32", float)           \
  X(DDL_FLOAT64, "float64", double)          \
  X(DDL_FLOAT16, "float16", ddl::Float16)    \
  X(DDL_BFLOAT16, "bfloat16", ddl::Bfloat16) \
  X(DDL_INT32, "int32", int32_t)             \
  X(DDL_INT64, "int64", int64_t)             \
  X(DDL_UINT8, "uint8", uint8_t)             \
  X(DDL_INT8, "int8", int8_t)

namespace ddl {

// Calls f(T{}, name) with the type and the name of `dtype`. Does nothing for a number that is not a dtype.
template <typename F>
constexpr void WithDtype(ddl_dtype dtype, F f) {
  switch (dtype) {
#define DDL_CASE(number, name, T) \
  case number:                    \
    return f(T{}, name);
    DDL_FOR_EACH_DTYPE(DDL_CASE)
#undef DDL_CASE
    case DDL_NUM_DTYPES:
      return;
  }
}

// Bytes of one element.
constexpr size_t DtypeSize(ddl_dtype dtype) {
  size_t size = 0;
  WithDtype(dtype, [&size](auto element, const char*) { size = sizeof element; });
  return size;
}

// "float32": the spelling of the Python layer, used in messages.
constexpr const char* DtypeName(ddl_dtype dtype) {
  const char* found = "unknown dtype";
  WithDtype(dtype, [&found](auto, const char* name) { found = name; });
  return found;
}

constexpr bool IsFloating(ddl_dtype dtype) {
  bool floating = false;
  WithDtype(dtype, [&floating](auto element, const char*) { floating = !std::is_integral_v<decltype(element)>; });
  return floating;
}

}  // namespace ddl
#endif  // KERAS_DDL_COMMON_DTYPES_H_
