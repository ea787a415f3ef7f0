// What the communication thread asks of the kernel's scheduler. A collective needs the communication threads of all
// ranks of a host at once, and for a short time; time that one of them waits for another is lost to all.
#ifndef KERAS_DDL_CORE_ENGINE_SCHEDULING_H_
#define KERAS_DDL_CORE_ENGINE_SCHEDULING_H_

#include <vector>

namespace ddl {

// Asks the kernel to run the calling thread soon after it wakes: by short time slices (Linux 6.12 and later) and, where
// the process may, by a higher priority. Otherwise a computing thread keeps the core for milliseconds. The
// communication threads sleep while there is nothing to do.
void RequestLowWakeupLatency();

// The cores of `usable` for communication thread `sharer` of `sharers`: every `sharers`-th core, so that no two threads
// share one; all cores when there are fewer cores than threads. 0 <= sharer < sharers.
std::vector<int> OwnCores(const std::vector<int>& usable, int sharer, int sharers);

// Binds the calling thread to those cores; `sharers`: the number of ranks whose processes may use exactly these cores
// (a rank bound to cores of its own has them to itself). Otherwise the kernel may wake the threads of two ranks on one
// core, because both are awake too briefly to be migrated: then they take turns instead of running together, and keep
// that core from TensorFlow twice as long.
void KeepToOwnCores(int sharer, int sharers);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_SCHEDULING_H_
