// What Linux tells in /proc.
#ifndef KERAS_DDL_CORE_BASE_PROC_FILES_H_
#define KERAS_DDL_CORE_BASE_PROC_FILES_H_

#include <string>

namespace ddl {

// The first line of a file, at most 511 bytes; empty when it can not be read.
std::string FirstLine(const std::string& path);

// "S 77 ...": what /proc/<pid>/stat says after the name, the state and the parent first; empty when it can not be read.
std::string ProcessStat(int pid);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_PROC_FILES_H_
