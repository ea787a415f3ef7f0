// Places: where every rank runs, for messages that send a person to the right machine, and for what depends on it.
#ifndef KERAS_DDL_CORE_LIVENESS_PLACES_H_
#define KERAS_DDL_CORE_LIVENESS_PLACES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

struct Place {
  std::string host;
  int pid = 0;
  // Another process of this machine, host name and process-id namespace: its pid means the same process here.
  bool same_pid_namespace = false;
  // Digest of the cores that it may use.
  uint64_t cores = 0;
};

class Places {
 public:
  // COLLECTIVE over the ranks of the transport.
  static Status Exchange(const ddl_transport& transport, Places* out);

  int size() const { return static_cast<int>(places_.size()); }
  const Place& at(int rank) const { return places_[static_cast<size_t>(rank)]; }
  // The processes of this machine that may use just the cores of `rank`'s, itself included, ascending.
  std::vector<int> SharersOfCores(int rank) const;
  // "rank 3 on host h2 (process 77)".
  std::string Of(int rank) const;
  // "rank(s) 4, 5 on host h2, rank(s) 6 on host h3".
  std::string Of(const std::vector<int>& ranks) const;
  // What the system says about the process of `rank` that explains silence, as in "is stopped (...)"; empty when it
  // says nothing of the kind, or the process is elsewhere.
  std::string Trouble(int rank) const;

 private:
  std::vector<Place> places_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_LIVENESS_PLACES_H_
