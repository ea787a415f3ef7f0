// Removes shared memory objects in /dev/shm that killed processes have left behind.
#ifndef KERAS_DDL_CORE_SHM_STALE_SHARED_MEMORY_H_
#define KERAS_DDL_CORE_SHM_STALE_SHARED_MEMORY_H_

#include <string>

namespace ddl {

// Group memory with a name (the fallback in group_memory.h) is unlinked as soon as all ranks have attached, within
// seconds; a leader killed before that leaves it behind. Removes such objects of processes that no longer exist.
// `min_age_s`: younger ones may belong to a process that cannot be seen from here (another process-id namespace).
void RemoveStaleSharedMemory(const std::string& folder = "/dev/shm", double min_age_s = 120);

// "/keras_ddl-<pid>-<16 random digits>", for shm_open.
std::string NewSharedMemoryName();

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_STALE_SHARED_MEMORY_H_
