// Reproducible elements of every dtype, including special values.
#ifndef KERAS_DDL_TESTS_TEST_DATA_H_
#define KERAS_DDL_TESTS_TEST_DATA_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "ddl.h"
#include "kernels/kernels.h"

namespace ddl_test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// xorshift64*: small, fast, the same on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  uint64_t Next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du;
  }
  uint64_t Below(uint64_t limit) { return Next() % limit; }

 private:
  uint64_t state_;
};

template <typename T>
void Put(std::vector<uint8_t>& bytes, size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
}

// `count` elements. One in eight has random bits (NaNs of every kind, infinities, subnormals, extreme integers), one
// in eight is a zero of either sign, the others are ordinary numbers.
inline std::vector<uint8_t> RandomElements(ddl_dtype dtype, size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> bytes(count * ddl::DtypeSize(dtype));
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = random.Next();
    const uint64_t choice = bits >> 61;
    const double number = static_cast<double>(static_cast<int64_t>(bits << 3) >> 3) * 0x1p-58;  // |number| < 8
    switch (dtype) {
      case DDL_FLOAT32:
        if (choice == 0) {
          Put(bytes, i, static_cast<uint32_t>(bits));
        } else {
          Put(bytes, i, choice == 1 ? ((bits & 1) != 0 ? -0.0f : 0.0f) : static_cast<float>(number));
        }
        break;
      case DDL_FLOAT64:
        if (choice == 0) {
          Put(bytes, i, bits << 3 | (bits & 7));
        } else {
          Put(bytes, i, choice == 1 ? ((bits & 1) != 0 ? -0.0 : 0.0) : number);
        }
        break;
      case DDL_FLOAT16:
        Put(bytes, i, static_cast<uint16_t>(choice == 1 ? bits & 0x8000 : choice == 0 ? bits : bits & 0xbfff));
        break;
      case DDL_BFLOAT16:
        Put(bytes, i,
            static_cast<uint16_t>(choice == 1   ? bits & 0x8000
                                  : choice == 0 ? bits
                                                : (bits & 0x81ff) | 0x3e00));
        break;
      case DDL_INT32:
        Put(bytes, i, static_cast<uint32_t>(choice == 0 ? bits : bits & 0xffff));
        break;
      case DDL_INT64:
        Put(bytes, i, choice == 0 ? bits << 3 : bits & 0xffffff);
        break;
      default:
        Put(bytes, i, static_cast<uint8_t>(bits));
        break;
    }
  }
  return bytes;
}

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_TEST_DATA_H_
