// Settings of the kernel's scheduler for communication threads. A collective needs the communication threads of all
// ranks of a host at the same time, and for a short time. If one of them waits for another, all of them lose that time.
#ifndef KERAS_DDL_CORE_ENGINE_SCHEDULING_H_
#define KERAS_DDL_CORE_ENGINE_SCHEDULING_H_

#include <vector>

namespace ddl {

// Asks the kernel to run the calling thread soon after it wakes: by short time slices (Linux 6.12 and later) and, if
// the process may set it, by a higher priority. Otherwise a computing thread keeps the core for milliseconds.
// Communication threads sleep while there is nothing to do.
void RequestLowWakeupLatency();

// The cores of `usable` for communication thread `sharer` of `sharers`: every `sharers`-th core, so that no two threads
// share one; all cores when there are fewer cores than threads. 0 <= sharer < sharers.
std::vector<int> OwnCores(const std::vector<int>& usable, int sharer, int sharers);

// Binds the calling thread to those cores. `sharers`: the number of ranks whose processes may use exactly these cores
// (1 for a rank that is bound to its own cores). Otherwise the kernel may wake the threads of two ranks on one core,
// because both are awake too briefly to be migrated. Then they take turns instead of running together, and keep
// TensorFlow off that core for twice as long.
void KeepToOwnCores(int sharer, int sharers);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_SCHEDULING_H_
