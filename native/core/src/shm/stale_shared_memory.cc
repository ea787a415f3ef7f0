#include "shm/stale_shared_memory.h"

#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <random>

namespace ddl {

std::string NewSharedMemoryName() {
  std::random_device random;
  char name[64];
  std::snprintf(name, sizeof name, "/keras_ddl-%d-%08x%08x", static_cast<int>(getpid()), random(), random());
  return name;
}

void RemoveStaleSharedMemory(const std::string& folder, double min_age_s) {
  DIR* const directory = opendir(folder.c_str());
  if (directory == nullptr) return;
  while (const dirent* const entry = readdir(directory)) {
    int pid = 0;
    int length = 0;
    if (std::sscanf(entry->d_name, "keras_ddl-%d-%*16[0-9a-f]%n", &pid, &length) != 1 || length == 0) continue;
    if (entry->d_name[length] != '\0' || pid <= 0) continue;
    const std::string path = folder + "/" + entry->d_name;
    struct stat status{};
    if (lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != geteuid()) continue;
    if (static_cast<double>(time(nullptr) - status.st_mtime) < min_age_s) continue;
    if (kill(pid, 0) != 0 && errno == ESRCH) unlink(path.c_str());
  }
  closedir(directory);
}

}  // namespace ddl
