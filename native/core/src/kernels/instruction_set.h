// The kernels of this processor, and the mode in which they calculate. Internal to the files of this folder that call
// them; not for those that are compiled for one instruction set.
#ifndef KERAS_DDL_CORE_KERNELS_INSTRUCTION_SET_H_
#define KERAS_DDL_CORE_KERNELS_INSTRUCTION_SET_H_

#include <cstdint>

#include "kernels/table.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ddl {

// Chosen at the first call; see kernels.h.
const KernelTable& Kernels();

#if defined(__x86_64__)
constexpr unsigned kDefaultFloatMode = 0x1f80;  // all exceptions masked, nearest even, subnormals kept
inline unsigned FloatMode() { return _mm_getcsr(); }
inline void SetFloatMode(unsigned mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
constexpr uint64_t kDefaultFloatMode = 0;  // as above
inline uint64_t FloatMode() {
  uint64_t mode = 0;
  asm volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
  return mode;
}
inline void SetFloatMode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
constexpr int kDefaultFloatMode = 0;
inline int FloatMode() { return kDefaultFloatMode; }
inline void SetFloatMode(int) {}
#endif

// Default rounding and subnormals while a kernel runs. A thread inherits its creator's mode, and any library built
// with -ffast-math that Python has loaded may have switched subnormals off: ranks would differ.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(FloatMode()) {
    if (saved_ != kDefaultFloatMode) SetFloatMode(kDefaultFloatMode);
  }
  ~DefaultFloatMode() {
    if (saved_ != kDefaultFloatMode) SetFloatMode(saved_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  const decltype(FloatMode()) saved_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_INSTRUCTION_SET_H_
