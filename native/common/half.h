// float16 and bfloat16 as scalars, for code that is not a kernel.
#ifndef KERAS_DDL_COMMON_HALF_H_
#define KERAS_DDL_COMMON_HALF_H_

#include <cstdint>
#include <cstring>

namespace ddl {

inline float FloatOfBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t BitsOfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Bfloat16 {
  uint16_t bits;

  float ToFloat() const { return FloatOfBits(static_cast<uint32_t>(bits) << 16); }

  // Rounds to nearest even.
  static Bfloat16 FromFloat(float value) {
    uint32_t bits = BitsOfFloat(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};  // NaN stays NaN
    bits += 0x7fffu + ((bits >> 16) & 1u);
    return {static_cast<uint16_t>(bits >> 16)};
  }
};

struct Float16 {
  uint16_t bits;

  float ToFloat() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0x1fu) return FloatOfBits(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0) return FloatOfBits(sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // subnormal, exact
    return FloatOfBits(sign | BitsOfFloat(magnitude));
  }

  // Rounds to nearest even; beyond 65504 to infinity.
  static Float16 FromFloat(float value) {
    const uint32_t all = BitsOfFloat(value);
    const uint16_t sign = static_cast<uint16_t>((all >> 16) & 0x8000u);
    const uint32_t bits = all & 0x7fffffffu;
    if (bits > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x3ffu))};
    if (bits >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65536 and more
    if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 lets the processor round the subnormal's last place
      const uint32_t rounded = BitsOfFloat(FloatOfBits(bits) + 0.5f) - BitsOfFloat(0.5f);
      return {static_cast<uint16_t>(sign | rounded)};
    }
    const uint32_t rounded = bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u);
    return {static_cast<uint16_t>(sign | (rounded >> 13))};
  }
};

}  // namespace ddl
#endif  // KERAS_DDL_COMMON_HALF_H_
