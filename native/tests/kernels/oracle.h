// The expected results of the kernels, in plain scalar code written from the formats' definitions. It shares nothing
// with the kernels.
#ifndef KERAS_DDL_TESTS_KERNELS_ORACLE_H_
#define KERAS_DDL_TESTS_KERNELS_ORACLE_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "ddl.h"

namespace ddl_test {

// A binary format of 1 sign bit, `exponent_bits` and `mantissa_bits`.
struct HalfFormat {
  int exponent_bits;
  int mantissa_bits;
};
constexpr HalfFormat kFloat16{5, 10};
constexpr HalfFormat kBfloat16{8, 7};

inline double DecodeHalf(HalfFormat format, uint16_t bits) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int exponent = (bits >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << format.exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << format.mantissa_bits), exponent - bias - format.mantissa_bits);
}

// Rounds to nearest even (the default mode of nearbyint). NaN gives the quiet NaN without sign or payload.
inline uint16_t EncodeHalf(HalfFormat format, double value) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int infinity = ((1 << format.exponent_bits) - 1) << format.mantissa_bits;
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | (1 << (format.mantissa_bits - 1)));
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | infinity);
  int exponent = magnitude == 0 ? 1 - bias : std::ilogb(magnitude);
  if (exponent < 1 - bias) exponent = 1 - bias;
  // Computes in units of the last place of the binade `exponent`. A carry into the next binade is right, because the
  // encoding is monotonic.
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const int encoded = static_cast<int>(units) + ((exponent + bias - 1) << format.mantissa_bits);
  return static_cast<uint16_t>(sign | (encoded >= infinity ? infinity : encoded));
}

// ---- one element type per dtype: Value is stored, Wide is used in calculations --------------------------------------

template <typename T>
struct FloatElement {
  using Value = T;
  using Wide = T;
  static Wide Widen(Value value) { return value; }
  static Value Narrow(Wide value) { return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value; }
};

template <const HalfFormat& kFormat>
struct HalfElement {
  using Value = uint16_t;
  using Wide = float;
  static Wide Widen(Value value) {
    static const std::vector<float> table = [] {
      std::vector<float> values(65536);
      for (int i = 0; i < 65536; ++i) values[i] = static_cast<float>(DecodeHalf(kFormat, static_cast<uint16_t>(i)));
      return values;
    }();
    return table[value];
  }
  static Value Narrow(Wide value) { return EncodeHalf(kFormat, value); }
};

template <typename Wide>
Wide ReduceFloating(ddl_op op, Wide a, Wide b) {
  switch (op) {
    case DDL_MIN:
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<Wide>::quiet_NaN() : (b < a ? b : a);
    case DDL_MAX:
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<Wide>::quiet_NaN() : (b > a ? b : a);
    case DDL_PRODUCT:
      return a * b;
    default:
      return a + b;
  }
}

template <typename Element>
void OracleFloating(ddl_op op, const std::vector<const void*>& in, size_t count, double divisor, void* out) {
  using Value = typename Element::Value;
  using Wide = typename Element::Wide;
  const auto at = [&](size_t k, size_t i) {
    Value value;
    std::memcpy(&value, static_cast<const char*>(in[k]) + i * sizeof value, sizeof value);
    return value;
  };
  for (size_t i = 0; i < count; ++i) {
    Value result = at(0, i);
    if (in.size() > 1 || op == DDL_MEAN) {  // a single input is copied bit by bit
      Wide sum = Element::Widen(result);
      for (size_t k = 1; k < in.size(); ++k) sum = ReduceFloating(op, sum, Element::Widen(at(k, i)));
      if (op == DDL_MEAN) sum = sum / static_cast<Wide>(divisor);
      result = Element::Narrow(sum);
    }
    std::memcpy(static_cast<char*>(out) + i * sizeof result, &result, sizeof result);
  }
}

// Integers: sums and products modulo 2^64, truncated to the type.
template <typename T>
void OracleInteger(ddl_op op, const std::vector<const void*>& in, size_t count, void* out) {
  const auto at = [&](size_t k, size_t i) {
    T value;
    std::memcpy(&value, static_cast<const char*>(in[k]) + i * sizeof value, sizeof value);
    return value;
  };
  for (size_t i = 0; i < count; ++i) {
    T result = at(0, i);
    for (size_t k = 1; k < in.size(); ++k) {
      const T next = at(k, i);
      const uint64_t a = static_cast<uint64_t>(result);
      const uint64_t b = static_cast<uint64_t>(next);
      if (op == DDL_MIN) {
        result = next < result ? next : result;
      } else if (op == DDL_MAX) {
        result = next > result ? next : result;
      } else {
        result = static_cast<T>(op == DDL_PRODUCT ? a * b : a + b);
      }
    }
    std::memcpy(static_cast<char*>(out) + i * sizeof result, &result, sizeof result);
  }
}

inline void OracleReduce(ddl_dtype dtype, ddl_op op, const std::vector<const void*>& in, size_t count, double divisor,
                         void* out) {
  switch (dtype) {
    case DDL_FLOAT32:
      return OracleFloating<FloatElement<float>>(op, in, count, divisor, out);
    case DDL_FLOAT64:
      return OracleFloating<FloatElement<double>>(op, in, count, divisor, out);
    case DDL_FLOAT16:
      return OracleFloating<HalfElement<kFloat16>>(op, in, count, divisor, out);
    case DDL_BFLOAT16:
      return OracleFloating<HalfElement<kBfloat16>>(op, in, count, divisor, out);
    case DDL_INT32:
      return OracleInteger<int32_t>(op, in, count, out);
    case DDL_INT64:
      return OracleInteger<int64_t>(op, in, count, out);
    case DDL_UINT8:
      return OracleInteger<uint8_t>(op, in, count, out);
    case DDL_INT8:
      return OracleInteger<int8_t>(op, in, count, out);
    case DDL_NUM_DTYPES:
      return;
  }
}

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_KERNELS_ORACLE_H_
