// The one rule for exceptions. Nothing in the core throws but the standard library, where memory is short:
// std::bad_alloc, or std::length_error for a size that no machine has. Whoever must not throw, or must tidy up before
// an exception goes on, runs what may allocate in GuardMemory; nothing else in the core catches (but for the system's
// refusal of a thread, see communication_thread.cc).
#ifndef KERAS_DDL_CORE_BASE_GUARD_H_
#define KERAS_DDL_CORE_BASE_GUARD_H_

#include <exception>

#include "base/status.h"

namespace ddl {

// Returns what `work` returns or, if it throws, what `when_short(exception)` returns. `when_short` may rethrow
// (`throw;`), and allocates nothing otherwise.
template <typename Work, typename WhenShort>
auto GuardMemory(Work work, WhenShort when_short) -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception& shortage) {
    return when_short(shortage);
  }
}

// So short that std::string keeps the message without allocating.
inline Status OutOfMemory() { return {DDL_INTERNAL, "out of memory"}; }

// The status that `work` returns, or OutOfMemory.
template <typename Work>
Status GuardedStatus(Work work) {
  return GuardMemory([&]() -> Status { return work(); }, [](const std::exception&) { return OutOfMemory(); });
}

// Runs `work`; whether it did so to its end.
template <typename Work>
bool Completes(Work work) {
  return GuardMemory(
      [&] {
        work();
        return true;
      },
      [](const std::exception&) { return false; });
}

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_GUARD_H_
