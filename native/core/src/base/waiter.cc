#include "base/waiter.h"

#include <string>

namespace ddl {

double Now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

Waiter::Waiter(std::function<Status()> health, double deadline_s, int sharers)
    : health_(std::move(health)), deadline_s_(deadline_s) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
  spins_ = known && CPU_COUNT(&cores) < sharers ? kReducedSpins : kSpins;
}

Status Waiter::DeadlineExceeded(const std::string& waits_for, double seconds) {
  return {DDL_DEADLINE_EXCEEDED,
          "in the middle of a collective, no progress for " + std::to_string(static_cast<int>(seconds)) +
              " s: waiting for " + waits_for +
              ", whose process is alive but not responding (stopped, swapped out, or its host is unreachable). Raise "
              "KERAS_DDL_DEADLINE_SECONDS if it is only slow."};
}

}  // namespace ddl
