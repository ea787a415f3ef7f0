// The baseline that collectives are compared with: every rank gets all ranks' data and adds it up by itself, in plain
// loops. Shares nothing with the kernels that it checks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "common/dtypes.h"
#include "host/transport.h"

namespace ddl {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 18;  // of each rank, at a time

template <typename T>
auto Widen(T value) {
  if constexpr (!std::is_arithmetic_v<T>) {
    return value.ToFloat();
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(value);
  } else {
    return value;
  }
}

template <typename T, typename Wide>
T Narrow(Wide value) {
  if constexpr (!std::is_arithmetic_v<T>) {
    return T::FromFloat(value);
  } else {
    return static_cast<T>(value);
  }
}

// Integers wrap; a NaN stays.
template <typename Wide>
Wide Combine(Wide a, Wide b, ddl_op op) {
  if (op == DDL_MIN || op == DDL_MAX) {
    if constexpr (std::is_floating_point_v<Wide>) {
      if (std::isnan(a)) return a;
      if (std::isnan(b)) return b;
    }
    return op == DDL_MIN ? std::min(a, b) : std::max(a, b);
  }
  if constexpr (std::is_integral_v<Wide>) {
    const auto x = static_cast<uint64_t>(a);
    const auto y = static_cast<uint64_t>(b);
    return static_cast<Wide>(op == DDL_PRODUCT ? x * y : x + y);
  } else {
    return op == DDL_PRODUCT ? a * b : a + b;
  }
}

template <typename T>
void ReduceBlock(const char* parts, int size, size_t count, ddl_op op, char* out) {
  for (size_t i = 0; i < count; ++i) {
    T element;
    std::memcpy(&element, parts + i * sizeof element, sizeof element);
    auto reduced = Widen(element);
    for (int rank = 1; rank < size; ++rank) {
      std::memcpy(&element, parts + (static_cast<size_t>(rank) * count + i) * sizeof element, sizeof element);
      reduced = Combine(reduced, Widen(element), op);
    }
    if (op == DDL_MEAN) reduced /= static_cast<decltype(reduced)>(size);
    element = Narrow<T>(reduced);
    std::memcpy(out + i * sizeof element, &element, sizeof element);
  }
}

}  // namespace

Status HostTransport::AllReduce(const void* in, void* out, uint64_t count, ddl_dtype dtype, ddl_op op) {
  const size_t element_bytes = DtypeSize(dtype);
  if (element_bytes == 0) return {DDL_INVALID_ARGUMENT, "no such dtype"};
  const size_t block = std::min<size_t>(count, kBlockBytes / element_bytes);
  const std::unique_ptr<char[]> parts(new (std::nothrow) char[static_cast<size_t>(size_) * block * element_bytes + 1]);
  if (parts == nullptr) return {DDL_INTERNAL, "out of memory for an all-reduce"};
  for (uint64_t at = 0; at < count; at += block) {
    const auto n = static_cast<size_t>(std::min<uint64_t>(block, count - at));
    const size_t offset = static_cast<size_t>(at) * element_bytes;
    DDL_RETURN_IF_ERROR(AllGather(static_cast<const char*>(in) + offset, parts.get(), n * element_bytes, -1, nullptr));
    WithDtype(dtype, [&](auto element, const char*) {
      ReduceBlock<decltype(element)>(parts.get(), size_, n, op, static_cast<char*>(out) + offset);
    });
  }
  return {};
}

}  // namespace ddl
