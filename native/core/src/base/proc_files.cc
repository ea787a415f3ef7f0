#include "base/proc_files.h"

#include <cstdio>

namespace ddl {

std::string FirstLine(const std::string& path) {
  char text[512] = "";
  if (FILE* const file = std::fopen(path.c_str(), "re"); file != nullptr) {
    if (std::fgets(text, sizeof text, file) == nullptr) text[0] = '\0';
    std::fclose(file);
  }
  return text;
}

std::string ProcessStat(int pid) {
  const std::string stat = FirstLine("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(") ");  // the name may contain anything
  return name_end == std::string::npos ? "" : stat.substr(name_end + 2);
}

}  // namespace ddl
