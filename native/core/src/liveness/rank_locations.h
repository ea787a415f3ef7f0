// RankLocations: the host and process of every rank, for error messages that point to the right machine and for
// decisions that depend on who shares one.
#ifndef KERAS_DDL_CORE_LIVENESS_RANK_LOCATIONS_H_
#define KERAS_DDL_CORE_LIVENESS_RANK_LOCATIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

struct RankLocation {
  std::string host;
  int pid = 0;
  // Another process on this machine, with the same host name and process-id namespace: its pid is valid here.
  bool same_pid_namespace = false;
  // Hash of the cores that it may use.
  uint64_t cores = 0;
};

class RankLocations {
 public:
  // COLLECTIVE over the ranks of the transport.
  static Status Exchange(const ddl_transport& transport, RankLocations* out);

  int size() const { return static_cast<int>(locations_.size()); }
  const RankLocation& at(int rank) const { return locations_[static_cast<size_t>(rank)]; }
  // The ranks on this machine whose processes may use exactly the cores of `rank`'s, itself included, ascending.
  std::vector<int> RanksOnSameCores(int rank) const;
  // "rank 3 on host h2 (process 77)".
  std::string Describe(int rank) const;
  // "rank(s) 4, 5 on host h2, rank(s) 6 on host h3".
  std::string Describe(const std::vector<int>& ranks) const;
  // Why the process of `rank` is silent, according to the operating system, such as "is stopped (...)"; empty when it
  // reports no problem, or when the process is on another machine.
  std::string ProcessProblem(int rank) const;

 private:
  std::vector<RankLocation> locations_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_LIVENESS_RANK_LOCATIONS_H_
