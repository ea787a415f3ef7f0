// Names in /dev/shm that a killed process has left behind.
#ifndef KERAS_DDL_CORE_SHM_JANITOR_H_
#define KERAS_DDL_CORE_SHM_JANITOR_H_

#include <string>

namespace ddl {

// Group memory that has a name (group_memory.h: the second try) loses it as soon as all ranks have attached, within
// seconds; a leader killed in between leaves it. Removes such names of processes that are gone. `min_age_s`: younger
// ones may belong to a process that can not be seen from here (another process-id namespace).
void RemoveStaleSharedMemory(const std::string& folder = "/dev/shm", double min_age_s = 120);

// "/keras_ddl-<pid>-<16 random digits>", for shm_open.
std::string NewSharedMemoryName();

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_JANITOR_H_
