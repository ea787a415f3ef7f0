#include "engine/scheduling.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace ddl {

void RequestLowWakeupLatency() {
  if (sched_getscheduler(0) != SCHED_OTHER) return;  // the policy was chosen deliberately
  constexpr int kNice = -10;
  // If that is not allowed (RLIMIT_NICE), nothing changes.
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

std::vector<int> OwnCores(const std::vector<int>& usable, int sharer, int sharers) {
  if (usable.size() < static_cast<size_t>(sharers)) return usable;
  std::vector<int> own;
  for (auto i = static_cast<size_t>(sharer); i < usable.size(); i += static_cast<size_t>(sharers)) {
    own.push_back(usable[i]);
  }
  return own;
}

void KeepToOwnCores(int sharer, int sharers) {
  if (sharers < 2) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // Fails on machines of more than 1024 cores, where threads rarely share a core.
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return;
  std::vector<int> usable;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &cores)) usable.push_back(core);
  }
  CPU_ZERO(&cores);
  for (const int core : OwnCores(usable, sharer, sharers)) CPU_SET(core, &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

}  // namespace ddl
