// 64-bit FNV-1a (Fowler, Noll and Vo): equal on every machine and in every run, unlike std::hash.
#ifndef KERAS_DDL_CORE_BASE_HASH_H_
#define KERAS_DDL_CORE_BASE_HASH_H_

#include <cstdint>
#include <string_view>

namespace ddl {

inline uint64_t Hash(std::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_HASH_H_
