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
typedef uint16_t HalfWords __attribute__((vector_size(kVectorBytes / 2)));
using Doubles = Vector<double>;

constexpr size_t kLanes = 8;
constexpr size_t kDoubles = kVectorBytes / sizeof(double);
constexpr size_t kSums = kLanes / kDoubles;
constexpr size_t kFloats = kVectorBytes / sizeof(float);

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

// Unlike the pairs of simd.h these keep the order of the elements.
template <typename Format>
struct InOrder;

template <>
struct InOrder<Bfloat16> {
  static DDL_INLINE Floats Widen(HalfWords raw) { return (Floats)(__builtin_convertvector(raw, Words) << 16); }
  static DDL_INLINE HalfWords Narrow(Floats value) {
    return __builtin_convertvector(RoundToBfloat16(value) >> 16, HalfWords);
  }
};

template <>
struct InOrder<Float16> {
#if defined(__AVX512BW__)
  static DDL_INLINE Floats Widen(HalfWords raw) { return (Floats)_mm512_cvtph_ps((__m256i)raw); }
  static DDL_INLINE HalfWords Narrow(Floats value) {
    return (HalfWords)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
  }
#elif defined(__AVX2__) && defined(__F16C__)
  static DDL_INLINE Floats Widen(HalfWords raw) { return (Floats)_mm256_cvtph_ps((__m128i)raw); }
  static DDL_INLINE HalfWords Narrow(Floats value) {
    return (HalfWords)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  }
#else
  static DDL_INLINE Floats Widen(HalfWords raw) { return WidenFloat16(__builtin_convertvector(raw, Words)); }
  static DDL_INLINE HalfWords Narrow(Floats value) { return __builtin_convertvector(NarrowFloat16(value), HalfWords); }
#endif
};

template <typename Format>
void WidenOf(const uint8_t* in, uint8_t* out, size_t count) {
  HalfWords raw;
  for (; count >= kFloats; count -= kFloats, in += sizeof raw, out += kVectorBytes) {
    __builtin_memcpy(&raw, in, sizeof raw);
    StoreCached(out, (Bytes)InOrder<Format>::Widen(raw));
  }
  raw = HalfWords{};
  __builtin_memcpy(&raw, in, count * sizeof raw[0]);
  const Floats last = InOrder<Format>::Widen(raw);
  __builtin_memcpy(out, &last, count * sizeof last[0]);
}

template <typename Format>
void NarrowOf(const uint8_t* in, uint8_t* out, size_t count) {
  HalfWords raw;
  for (; count >= kFloats; count -= kFloats, in += kVectorBytes, out += sizeof raw) {
    raw = InOrder<Format>::Narrow(CanonicalNan((Floats)Load(in)));
    __builtin_memcpy(out, &raw, sizeof raw);
  }
  Floats last{};
  __builtin_memcpy(&last, in, count * sizeof last[0]);
  raw = InOrder<Format>::Narrow(CanonicalNan(last));
  __builtin_memcpy(out, &raw, count * sizeof raw[0]);
}

#define DDL_ADAPTIVE_SUM_KERNELS                                                                                   \
  {DotsOf<float>, DotsOf<double>}, {CombineOf<float>, CombineOf<double>}, {WidenOf<Float16>, WidenOf<Bfloat16>}, { \
    NarrowOf<Float16>, NarrowOf<Bfloat16>                                                                          \
  }

}  // namespace
}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_ADAPTIVE_SUM_VECTORS_H_
