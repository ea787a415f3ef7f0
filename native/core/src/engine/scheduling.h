// What the communication thread asks of the kernel's scheduler. A collective needs the communication threads of all
// ranks of a host at once, and for a short time; what they wait for each other is lost to all of them.
#ifndef KERAS_DDL_CORE_ENGINE_SCHEDULING_H_
#define KERAS_DDL_CORE_ENGINE_SCHEDULING_H_

#include <vector>

namespace ddl {

// Asks the kernel to let the calling thread run soon after it wakes: by short slices (Linux 6.12 and later) and, where
// the process may, by a higher priority. A thread that computes keeps the core for milliseconds otherwise. The
// communication threads sleep while there is nothing to do.
void RunSoonAfterWaking();

// Those of the cores `usable` that one of `sharers` communication threads keeps to: every `sharers`-th, so that no two
// of them share one; all of the cores when there are fewer of them than threads. 0 <= sharer < sharers.
std::vector<int> CoresOf(const std::vector<int>& usable, int sharer, int sharers);

// Keeps the calling thread to those of its cores; `sharers`: the ranks whose processes may use just these cores (a rank
// that was bound to cores of its own has them to itself). Left to itself the kernel may wake the threads of two ranks
// on one core, because both are awake for too short a time to be moved: then they take turns where they should work
// together, and keep that core from TensorFlow twice as long.
void StayOffOtherRanksCores(int sharer, int sharers);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_SCHEDULING_H_
