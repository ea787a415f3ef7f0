// One float16 or bfloat16 as float32, for code that is not a kernel.
#ifndef KERAS_DDL_CORE_BASE_HALF_H_
#define KERAS_DDL_CORE_BASE_HALF_H_

#include <cstdint>
#include <cstring>

namespace ddl {

inline float Bfloat16ToFloat(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline float Float16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t widened = exponent == 31 ? 255 : exponent + 112;
  const uint32_t word = sign | (widened << 23) | (mantissa << 13);
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_HALF_H_
