// float32 as 16 bits and back, over the vectors of simd.h: what kernels.h calls Narrow, Widen and LargestFinite.
// Included by one source file per instruction set, after reduce.h.
//
// As there, heads and tails that do not fill a vector go through the same code, padded with zeros.
#ifndef KERAS_DDL_CORE_KERNELS_NARROW_H_
#define KERAS_DDL_CORE_KERNELS_NARROW_H_

#include "kernels/reduce.h"

namespace ddl {
namespace {

typedef uint16_t HalfWords __attribute__((vector_size(kVectorBytes / 2)));
constexpr size_t kFloats = kVectorBytes / sizeof(float);

struct AsBfloat16 {
  static DDL_INLINE Floats Widen(HalfWords narrow) { return (Floats)(__builtin_convertvector(narrow, Words) << 16); }
  static DDL_INLINE HalfWords Narrow(Floats value) {
    return __builtin_convertvector(RoundToBfloat16(value) >> 16, HalfWords);
  }
};

struct AsFloat16 {
#if defined(__AVX512BW__)
  static DDL_INLINE Floats Widen(HalfWords narrow) { return (Floats)_mm512_cvtph_ps((__m256i)narrow); }
  static DDL_INLINE HalfWords Narrow(Floats value) {
    return (HalfWords)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
  }
#elif defined(__AVX2__) && defined(__F16C__)
  static DDL_INLINE Floats Widen(HalfWords narrow) { return (Floats)_mm256_cvtph_ps((__m128i)narrow); }
  static DDL_INLINE HalfWords Narrow(Floats value) {
    return (HalfWords)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  }
#else
  static DDL_INLINE Floats Widen(HalfWords narrow) { return WidenFloat16(__builtin_convertvector(narrow, Words)); }
  static DDL_INLINE HalfWords Narrow(Floats value) {
    return __builtin_convertvector(NarrowFloat16(value) & 0xffffu, HalfWords);
  }
#endif
};

template <typename V>
DDL_INLINE V LoadPart(const void* from, size_t bytes) {
  V value{};
  __builtin_memcpy(&value, from, bytes);
  return value;
}

DDL_INLINE Floats FiniteOrZero(Floats value) {
  const Words is_finite = (Words)(((Words)value & 0x7fffffffu) < 0x7f800000u);
  return (Floats)((Words)value & is_finite);
}

// One vector, of which `n` elements exist. kError: whether `error` is written.
template <typename Format, bool kError>
DDL_INLINE void NarrowVector(const float* in, float scale, uint8_t* out, float unit, float* error, size_t n) {
  const Floats value = LoadPart<Floats>(in, n * sizeof(float));
  const HalfWords narrow = Format::Narrow(CanonicalNan(value * scale));
  __builtin_memcpy(out, &narrow, n * sizeof(uint16_t));
  if (!kError) return;
  const Floats lost = FiniteOrZero((value - Format::Widen(narrow) * (1 / scale)) * unit);
  __builtin_memcpy(error, &lost, n * sizeof(float));
}

template <typename Format, bool kError>
DDL_INLINE void NarrowLoop(const float* in, float scale, uint8_t* out, float unit, float* error, size_t count) {
  size_t i = 0;
  for (; count - i >= kFloats; i += kFloats) {
    NarrowVector<Format, kError>(in + i, scale, out + i * 2, unit, kError ? error + i : nullptr, kFloats);
  }
  if (i < count)
    NarrowVector<Format, kError>(in + i, scale, out + i * 2, unit, kError ? error + i : nullptr, count - i);
}

template <typename Format>
void NarrowAll(const float* in, float scale, uint8_t* out, float unit, float* error, size_t count) {
  if (error == nullptr) {
    NarrowLoop<Format, false>(in, scale, out, unit, error, count);
  } else {
    NarrowLoop<Format, true>(in, scale, out, unit, error, count);
  }
}

template <typename Format, bool kAdds>
DDL_INLINE void WidenVector(const uint8_t* in, float factor, float* out, size_t n) {
  Floats value = Format::Widen(LoadPart<HalfWords>(in, n * sizeof(uint16_t))) * factor;
  if (kAdds) value = value + LoadPart<Floats>(out, n * sizeof(float));
  value = CanonicalNan(value);
  __builtin_memcpy(out, &value, n * sizeof(float));
}

template <typename Format, bool kAdds>
DDL_INLINE void WidenLoop(const uint8_t* in, float factor, float* out, size_t count) {
  size_t i = 0;
  for (; count - i >= kFloats; i += kFloats) WidenVector<Format, kAdds>(in + i * 2, factor, out + i, kFloats);
  if (i < count) WidenVector<Format, kAdds>(in + i * 2, factor, out + i, count - i);
}

template <typename Format>
void WidenAll(const uint8_t* in, float factor, float* out, size_t count, bool adds) {
  if (adds) {
    WidenLoop<Format, true>(in, factor, out, count);
  } else {
    WidenLoop<Format, false>(in, factor, out, count);
  }
}

float LargestFiniteOf(const float* in, size_t count) {
  Words largest{};  // magnitudes compare like whole numbers
  for (size_t i = 0; i < count; i += kFloats) {
    const size_t n = count - i < kFloats ? count - i : kFloats;
    const Words bits = (Words)FiniteOrZero(LoadPart<Floats>(in + i, n * sizeof(float))) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  uint32_t found = 0;
  for (size_t lane = 0; lane < kFloats; ++lane) found = largest[lane] > found ? largest[lane] : found;
  float value;
  __builtin_memcpy(&value, &found, sizeof value);
  return value;
}

}  // namespace
}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_NARROW_H_
