#include "waiter.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>

namespace ddl {

double Now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void RunSoonAfterWaking() {
  if (sched_getscheduler(0) != SCHED_OTHER) return;  // a policy that somebody chose on purpose
  constexpr int kNice = -10;
  // Where that is not allowed (RLIMIT_NICE), nothing changes.
  if (getpriority(PRIO_PROCESS, 0) > kNice) setpriority(PRIO_PROCESS, 0, kNice);
#ifdef SYS_sched_setattr
  constexpr uint64_t kSliceNs = 100'000;  // the least that the kernel takes
  // struct sched_attr of linux/sched/types.h, which clashes with glibc's headers of some versions.
  struct {
    uint32_t size;
    uint32_t policy;  // 0: SCHED_OTHER
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns;
    uint64_t deadline_ns;
    uint64_t period_ns;
  } attributes{sizeof attributes, 0, 0, getpriority(PRIO_PROCESS, 0), 0, kSliceNs, 0, 0};
  syscall(SYS_sched_setattr, 0, &attributes, 0U);
#endif
}

Waiter::Waiter(std::function<Status()> health, double deadline_s, int sharers)
    : health_(std::move(health)), deadline_s_(deadline_s) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
  spins_ = known && CPU_COUNT(&cores) < sharers ? kFewSpins : kSpins;
}

Status Waiter::Late(const std::string& waits_for, double seconds) {
  return {DDL_DEADLINE_EXCEEDED,
          "in the middle of a collective, no progress for " + std::to_string(static_cast<int>(seconds)) +
              " s: waiting for " + waits_for +
              ", whose process lives but does not answer (stopped, swapped out, or its host unreachable). Raise "
              "KERAS_DDL_DEADLINE_SECONDS if it is only slow."};
}

}  // namespace ddl
