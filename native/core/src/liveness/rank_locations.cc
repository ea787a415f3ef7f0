#include "liveness/rank_locations.h"

#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "base/gather.h"
#include "base/proc_files.h"
#include "base/text.h"
#include "common/hash.h"

namespace ddl {
namespace {

struct Record {
  uint64_t machine;
  uint64_t cores;
  int32_t pid;
  char host[64];
};

std::string LinkText(const char* path) {
  char text[128] = "";
  const ssize_t length = readlink(path, text, sizeof text - 1);
  return length > 0 ? std::string(text, static_cast<size_t>(length)) : "";
}

Record OwnRecord() {
  Record record{};
  gethostname(record.host, sizeof record.host - 1);
  record.pid = static_cast<int32_t>(getpid());
  record.machine = Hash(record.host + FirstLine("/proc/sys/kernel/random/boot_id") + LinkText("/proc/self/ns/ipc") +
                        LinkText("/proc/self/ns/pid"));
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) {
    record.cores = Hash({reinterpret_cast<const char*>(&cores), sizeof cores});
  }
  return record;
}

}  // namespace

Status RankLocations::Exchange(const ddl_transport& transport, RankLocations* out) {
  const Record mine = OwnRecord();
  std::vector<Record> all;
  DDL_RETURN_IF_ERROR(Gather(transport, mine, &all));
  out->locations_.clear();
  for (const Record& record : all) {
    // A rank that is a thread of this process cannot die alone.
    out->locations_.push_back(
        {record.host, record.pid, record.machine == mine.machine && record.pid != mine.pid, record.cores});
  }
  return {};
}

std::vector<int> RankLocations::RanksOnSameCores(int rank) const {
  std::vector<int> sharers;
  for (int r = 0; r < size(); ++r) {
    if (r == rank || (at(r).same_pid_namespace && at(r).cores == at(rank).cores)) sharers.push_back(r);
  }
  return sharers;
}

std::string RankLocations::Describe(int rank) const {
  return "rank " + std::to_string(rank) + " on host " + at(rank).host + " (process " + std::to_string(at(rank).pid) +
         ")";
}

std::string RankLocations::Describe(const std::vector<int>& ranks) const {
  std::map<std::string, std::vector<int>> by_host;
  for (int rank : ranks) by_host[at(rank).host].push_back(rank);
  std::string text;
  for (const auto& [host, there] : by_host) {
    text += (text.empty() ? "" : ", ") + ("rank(s) " + FormatRanks(there)) + " on host " + host;
  }
  return text;
}

std::string RankLocations::ProcessProblem(int rank) const {
  if (!at(rank).same_pid_namespace) return {};
  const std::string stat = ProcessStat(at(rank).pid);
  switch (stat.empty() ? '?' : stat[0]) {
    case 'T':
    case 't':
      return "is stopped (SIGSTOP, Ctrl-Z or a debugger)";
    case 'Z':
    case 'X':
      return "has ended";
    default:
      return {};
  }
}

}  // namespace ddl
