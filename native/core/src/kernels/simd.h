// The vector operations that the kernels need: vectors of kVectorBytes, float16 conversion, streaming stores.
//
// Each instruction set has one source file that includes this header and is compiled with its own flags. Everything is
// in an unnamed namespace, and no inline function of another header is used, because the linker must never keep a copy
// that was compiled for AVX-512 and use it on a processor without AVX-512. Arithmetic uses the vector extension of GCC
// and Clang, so the same source gives SSE2, AVX2, AVX-512 and NEON code.
#ifndef KERAS_DDL_CORE_KERNELS_SIMD_H_
#define KERAS_DDL_CORE_KERNELS_SIMD_H_

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12 warns about its own intentionally undefined vectors
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the 16-bit kernels assume a little-endian processor"
#endif

#define DDL_INLINE inline __attribute__((always_inline))

namespace ddl {
namespace {

constexpr size_t kLineBytes = 64;
#if defined(__AVX512BW__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;
using Bytes = Vector<uint8_t>;
using Floats = Vector<float>;
using Words = Vector<uint32_t>;

DDL_INLINE Bytes Load(const uint8_t* address) {
  Bytes value;
  __builtin_memcpy(&value, address, sizeof value);
  return value;
}

DDL_INLINE void StoreCached(uint8_t* address, Bytes value) { __builtin_memcpy(address, &value, sizeof value); }

// REQUIRES: `address` is a multiple of kVectorBytes.
DDL_INLINE void StoreStreaming(uint8_t* address, Bytes value) {
#if defined(__AVX512BW__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(address), (__m512i)value);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(address), (__m256i)value);
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(address), (__m128i)value);
#elif defined(__clang__)
  __builtin_nontemporal_store(value, reinterpret_cast<Bytes*>(address));
#else
  StoreCached(address, value);
#endif
}

// Streaming stores are weakly ordered on x86; without this fence, a later flag could overtake the data.
DDL_INLINE void StreamingFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// A vector of float16 or bfloat16 as two vectors of float32. Each format chooses the order of the elements, which its
// conversion back must restore.
struct FloatPair {
  Floats first, second;
};

#if defined(__AVX512BW__)

DDL_INLINE FloatPair Float16ToFloats(Bytes raw) {
  const __m256i first = _mm512_castsi512_si256((__m512i)raw);
  const __m256i second = _mm512_extracti64x4_epi64((__m512i)raw, 1);
  return {(Floats)_mm512_cvtph_ps(first), (Floats)_mm512_cvtph_ps(second)};
}

DDL_INLINE Bytes FloatsToFloat16(FloatPair value) {
  const __m256i first = _mm512_cvtps_ph((__m512)value.first, _MM_FROUND_TO_NEAREST_INT);
  const __m256i second = _mm512_cvtps_ph((__m512)value.second, _MM_FROUND_TO_NEAREST_INT);
  return (Bytes)_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

#elif defined(__AVX2__) && defined(__F16C__)

DDL_INLINE FloatPair Float16ToFloats(Bytes raw) {
  const __m256i halves = (__m256i)raw;
  return {(Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

DDL_INLINE Bytes FloatsToFloat16(FloatPair value) {
  const __m128i first = _mm256_cvtps_ph((__m256)value.first, _MM_FROUND_TO_NEAREST_INT);
  const __m128i second = _mm256_cvtps_ph((__m256)value.second, _MM_FROUND_TO_NEAREST_INT);
  return (Bytes)_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

#else

// Uses the integer method of F. Giesen, "Half to float done quic" (2012): shifts the bits, then corrects exponents that
// the shift gets wrong. `half` is zero-extended.
DDL_INLINE Floats WidenFloat16(Words half) {
  const Words magnitude = (half & 0x7fffu) << 13;
  const Words exponent = magnitude & (0x7c00u << 13);
  const Words rebased = magnitude + (112u << 23);
  const Words infinite_or_nan = (Words)(exponent == (0x7c00u << 13)) & (112u << 23);
  const Words normal = rebased + infinite_or_nan;
  // Subnormal: interpret it as 2^-14 + m * 2^-24, then subtract the 2^-14, which is exact.
  const Floats base = (Floats)(Words{} + (113u << 23));
  const Words subnormal = (Words)((Floats)(rebased + (1u << 23)) - base);
  const Words value = exponent == 0u ? subnormal : normal;
  return (Floats)(value | ((half & 0x8000u) << 16));
}

// Rounds to nearest even. The only NaN is the result of CanonicalNan.
DDL_INLINE Words NarrowFloat16(Floats value) {
  const Words bits = (Words)value;
  const Words sign = bits & 0x80000000u;
  const Words magnitude = bits ^ sign;
  const Words odd = (magnitude >> 13) & 1u;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  // Subnormal result: adding 0.5 aligns the last bit with float16's, and the addition itself rounds.
  const Words half = Words{} + (126u << 23);
  const Words subnormal = (Words)((Floats)magnitude + (Floats)half) - half;
  const Words special = magnitude > (255u << 23) ? Words{} + 0x7e00u : Words{} + 0x7c00u;
  const Words finite = magnitude < (113u << 23) ? subnormal : normal;
  const Words result = magnitude >= (143u << 23) ? special : finite;
  return result | (sign >> 16);
}

// The pair contains the even and the odd elements, so no shuffles are needed.
DDL_INLINE FloatPair Float16ToFloats(Bytes raw) {
  return {WidenFloat16((Words)raw & 0xffffu), WidenFloat16((Words)raw >> 16)};
}

DDL_INLINE Bytes FloatsToFloat16(FloatPair value) {
  return (Bytes)(NarrowFloat16(value.first) | (NarrowFloat16(value.second) << 16));
}

#endif

// The pair contains the even and the odd elements. A bfloat16 is the upper half of a float32.
DDL_INLINE FloatPair Bfloat16ToFloats(Bytes raw) {
  return {(Floats)((Words)raw << 16), (Floats)((Words)raw & 0xffff0000u)};
}

// Rounds to nearest even: adds half a unit of the last remaining place, minus one bit unless that place is odd. A carry
// out of the mantissa correctly increments the exponent, and the canonical NaN stays a NaN.
DDL_INLINE Words RoundToBfloat16(Floats value) {
  const Words bits = (Words)value;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

DDL_INLINE Bytes FloatsToBfloat16(FloatPair value) {
  return (Bytes)((RoundToBfloat16(value.first) >> 16) | (RoundToBfloat16(value.second) & 0xffff0000u));
}

}  // namespace
}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_SIMD_H_
