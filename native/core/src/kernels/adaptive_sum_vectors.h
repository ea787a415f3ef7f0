// The loops of adaptive_sum.h, over the vectors of simd.h. Included by one source file per instruction set.
//
// Products are summed in kLanes sums, element i in sum i % kLanes, whatever the length of a vector; a tail is padded
// with zeros.
#ifndef KERAS_DDL_CORE_KERNELS_ADAPTIVE_SUM_VECTORS_H_
#define KERAS_DDL_CORE_KERNELS_ADAPTIVE_SUM_VECTORS_H_

#include "kernels/reduce.h"

namespace ddl {
namespace {

typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));
using Doubles = Vector<double>;

constexpr size_t kLanes = 8;
constexpr size_t kDoubles = kVectorBytes / sizeof(double);
constexpr size_t kSums = kLanes / kDoubles;

template <typename T>
struct DoublesOf;
template <>
struct DoublesOf<float> {
  static DDL_INLINE Doubles Load(const uint8_t* at) {
    HalfFloats values;
    __builtin_memcpy(&values, at, sizeof values);
    return __builtin_convertvector(values, Doubles);
  }
};
template <>
struct DoublesOf<double> {
  static DDL_INLINE Doubles Load(const uint8_t* at) {
    Doubles values;
    __builtin_memcpy(&values, at, sizeof values);
    return values;
  }
};

struct DotSums {
  Doubles ab[kSums], aa[kSums], bb[kSums];
};

// Adds the products of kLanes elements.
template <typename T>
DDL_INLINE void AddLanes(const uint8_t* a, const uint8_t* b, DotSums& sums) {
  for (size_t s = 0; s < kSums; ++s) {
    const Doubles x = DoublesOf<T>::Load(a + s * kDoubles * sizeof(T));
    const Doubles y = DoublesOf<T>::Load(b + s * kDoubles * sizeof(T));
    sums.ab[s] += x * y;
    sums.aa[s] += x * x;
    sums.bb[s] += y * y;
  }
}

DDL_INLINE double SumOfLanes(const Doubles (&sums)[kSums]) {
  double lanes[kLanes];
  __builtin_memcpy(lanes, sums, sizeof lanes);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <typename T>
void DotsOf(const uint8_t* a, const uint8_t* b, size_t count, double* dots) {
  constexpr size_t kStep = kLanes * sizeof(T);
  DotSums sums{};
  size_t i = 0;
  for (; count - i >= kLanes; i += kLanes) {
    __builtin_prefetch(a + i * sizeof(T) + kPrefetchBytes);
    __builtin_prefetch(b + i * sizeof(T) + kPrefetchBytes);
    AddLanes<T>(a + i * sizeof(T), b + i * sizeof(T), sums);
  }
  if (i < count) {
    uint8_t last_a[kStep] = {}, last_b[kStep] = {};
    __builtin_memcpy(last_a, a + i * sizeof(T), (count - i) * sizeof(T));
    __builtin_memcpy(last_b, b + i * sizeof(T), (count - i) * sizeof(T));
    AddLanes<T>(last_a, last_b, sums);
  }
  dots[0] = SumOfLanes(sums.ab);
  dots[1] = SumOfLanes(sums.aa);
  dots[2] = SumOfLanes(sums.bb);
}

template <typename T>
void CombineOf(uint8_t* a, const uint8_t* b, size_t count, double share_a, double share_b) {
  const T first = static_cast<T>(share_a), second = static_cast<T>(share_b);
  const size_t bytes = count * sizeof(T);
  const auto block = [&](uint8_t* x, const uint8_t* y) __attribute__((always_inline)) {
    StoreCached(x, (Bytes)((Vector<T>)Load(x) * first + (Vector<T>)Load(y) * second));
  };
  size_t at = 0;
  for (; bytes - at >= kVectorBytes; at += kVectorBytes) {
    __builtin_prefetch(a + at + kPrefetchBytes);
    __builtin_prefetch(b + at + kPrefetchBytes);
    block(a + at, b + at);
  }
  if (at < bytes) {
    uint8_t last_a[kVectorBytes] = {}, last_b[kVectorBytes] = {};
    __builtin_memcpy(last_a, a + at, bytes - at);
    __builtin_memcpy(last_b, b + at, bytes - at);
    block(last_a, last_b);
    __builtin_memcpy(a + at, last_a, bytes - at);
  }
}

#define DDL_ADAPTIVE_SUM_KERNELS \
  {DotsOf<float>, DotsOf<double>}, { CombineOf<float>, CombineOf<double> }

}  // namespace
}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_ADAPTIVE_SUM_VECTORS_H_
