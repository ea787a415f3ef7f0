#include "kernels/kernels.h"

#include <cstring>

#include "kernels/instruction_set.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ddl {
namespace {

// Below this the libc copy is as fast.
constexpr size_t kPrefetchMinBytes = 8 * 1024;
// Below this starting a string move costs more than it saves.
constexpr size_t kRepMovsbFromBytes = 1024;

#if defined(__x86_64__)
// "Enhanced rep movsb": leaf 7, ebx, bit 9.
bool HasEnhancedStringMoves() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & (1u << 9)) != 0;
}

void StringMove(void* out, const void* in, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  std::memcpy(out, in, bytes);  // sanitizers do not see into assembly
#else
  asm volatile("rep movsb" : "+D"(out), "+S"(in), "+c"(bytes) : : "memory");
#endif
}
#endif

}  // namespace

void Reduce(ddl_dtype dtype, ddl_op op, const void* const* in, int n, void* out, size_t count, double divisor,
            Store store) {
  const size_t bytes = count * DtypeSize(dtype);
  if (bytes == 0) return;
  const bool divides = op == DDL_MEAN && IsFloating(dtype);
  if (n == 1 && !divides) {
    if (out != in[0]) Copy(out, in[0], bytes, store);
    return;
  }
  const DefaultFloatMode mode;
  Kernels().reduce[dtype][op](reinterpret_cast<const uint8_t* const*>(in), n, static_cast<uint8_t*>(out), bytes,
                              divisor, store == Store::kStreaming);
}

void Copy(void* out, const void* in, size_t bytes, Store store) {
  if (bytes == 0) return;
  if (store == Store::kStreaming) {
    Kernels().stream_copy(static_cast<uint8_t*>(out), static_cast<const uint8_t*>(in), bytes);
#if defined(__x86_64__)
  } else if (store == Store::kRepMovsb && bytes >= kRepMovsbFromBytes && HasRepMovsb()) {
    StringMove(out, in, bytes);
#endif
  } else if (bytes >= kPrefetchMinBytes) {
    Kernels().copy(static_cast<uint8_t*>(out), static_cast<const uint8_t*>(in), bytes);
  } else {
    std::memcpy(out, in, bytes);
  }
}

void Narrow(ddl_dtype to, const float* in, float scale, void* out, float unit, float* error, size_t count) {
  const DefaultFloatMode mode;
  Kernels().narrow[to == DDL_FLOAT16 ? 1 : 0](in, scale, static_cast<uint8_t*>(out), unit, error, count);
}

void Widen(ddl_dtype from, const void* in, float factor, float* out, size_t count, bool adds) {
  const DefaultFloatMode mode;
  Kernels().widen[from == DDL_FLOAT16 ? 1 : 0](static_cast<const uint8_t*>(in), factor, out, count, adds);
}

float LargestFinite(const float* in, size_t count) { return Kernels().largest_finite(in, count); }

bool HasRepMovsb() {
#if defined(__x86_64__)
  static const bool has = HasEnhancedStringMoves();
  return has;
#else
  return false;
#endif
}

}  // namespace ddl
