// fingerprint.h: a hash that ranks compare.
#ifndef KERAS_DDL_TF_FINGERPRINT_H_
#define KERAS_DDL_TF_FINGERPRINT_H_

#include <cstdint>

namespace keras_ddl::tf {

// 64-bit FNV-1a: equal on every machine and in every run, unlike std::hash.
class Fingerprint {
 public:
  void Add(uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) AddByte(static_cast<unsigned char>(value >> (8 * byte)));
  }
  uint64_t value() const { return value_; }

 private:
  void AddByte(unsigned char byte) { value_ = (value_ ^ byte) * 0x100000001b3u; }

  uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace keras_ddl::tf

#endif  // KERAS_DDL_TF_FINGERPRINT_H_
