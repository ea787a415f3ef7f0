// Reads files in /proc.
#ifndef KERAS_DDL_CORE_BASE_PROC_FILES_H_
#define KERAS_DDL_CORE_BASE_PROC_FILES_H_

#include <string>

namespace ddl {

// The first line of a file, at most 511 bytes; empty when it cannot be read.
std::string FirstLine(const std::string& path);

// "S 77 ...": the fields of /proc/<pid>/stat after the name: the state, the parent, ...; empty when it cannot be read.
std::string ProcessStat(int pid);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_PROC_FILES_H_
