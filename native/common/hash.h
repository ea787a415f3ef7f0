// 64-bit FNV-1a (Fowler, Noll and Vo): equal on every machine and in every run, unlike std::hash.
#ifndef KERAS_DDL_COMMON_HASH_H_
#define KERAS_DDL_COMMON_HASH_H_

#include <cstdint>
#include <string_view>

namespace ddl {

constexpr uint64_t kHashOfNothing = 14695981039346656037u;

// `before`: the hash of the bytes before `bytes`.
inline uint64_t Hash(std::string_view bytes, uint64_t before = kHashOfNothing) {
  uint64_t hash = before;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

// Hashes the number's eight bytes, lowest first.
inline uint64_t HashNumber(uint64_t number, uint64_t before) {
  char bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(number >> (8 * i));
  return Hash({bytes, sizeof bytes}, before);
}

}  // namespace ddl
#endif  // KERAS_DDL_COMMON_HASH_H_
