// The one rule for exceptions. Only the standard library throws in the core, when memory is short: std::bad_alloc, or
// std::length_error for a size that no machine has. Code that must not throw, or must clean up before an exception
// propagates, runs whatever may allocate in GuardMemory. Nothing else in the core catches exceptions, except
// communication_thread.cc if the system refuses to start a thread.
#ifndef KERAS_DDL_CORE_BASE_GUARD_H_
#define KERAS_DDL_CORE_BASE_GUARD_H_

#include <exception>

#include "base/status.h"

namespace ddl {

// Returns the result of `work` or, if it throws, of `when_short(exception)`. `when_short` may rethrow (`throw;`), and
// must not allocate otherwise.
template <typename Work, typename WhenShort>
auto GuardMemory(Work work, WhenShort when_short) -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception& shortage) {
    return when_short(shortage);
  }
}

// The message is short enough that std::string does not allocate.
inline Status OutOfMemory() { return {DDL_INTERNAL, "out of memory"}; }

// The status that `work` returns, or OutOfMemory.
template <typename Work>
Status GuardedStatus(Work work) {
  return GuardMemory([&]() -> Status { return work(); }, [](const std::exception&) { return OutOfMemory(); });
}

// Runs `work`, and returns whether it completed.
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
