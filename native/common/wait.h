// Waits without a deadline, even with the libstdc++ of GCC 11 (Red Hat Enterprise Linux 9). libstdc++ of GCC 12 has a
// new symbol for std::condition_variable::wait, so a library that is built with it would not load with older ones.
// wait_for has no new symbol.
#ifndef KERAS_DDL_COMMON_WAIT_H_
#define KERAS_DDL_COMMON_WAIT_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace ddl {

// changed.wait(lock, done)
template <typename Done>
void Wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Done done) {
  while (!changed.wait_for(lock, std::chrono::hours(1), done)) continue;
}

}  // namespace ddl
#endif  // KERAS_DDL_COMMON_WAIT_H_
