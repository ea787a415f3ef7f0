// Waiting without a deadline, also with the libstdc++ of GCC 11 (Red Hat's Linux 9): std::condition_variable::wait has
// a new symbol in that of GCC 12, and what is built with it would load nowhere else. wait_for has none.
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
