// PeerWatch: detects that a process on this host has died, for any reason.
#ifndef KERAS_DDL_CORE_LIVENESS_PEER_WATCH_H_
#define KERAS_DDL_CORE_LIVENESS_PEER_WATCH_H_

#include <poll.h>

#include <functional>
#include <vector>

#include "base/status.h"
#include "liveness/rank_locations.h"
#include "shm/group_memory.h"

namespace ddl {

class PeerWatch {
 public:
  // Watches the ranks of this group: by their processes in this pid namespace, else by the lock that they hold in the
  // group's memory (shm/life_lock.h). Rank 0 also watches the ranks of other groups in its pid namespace, and they
  // watch rank 0, so that all of them learn of a death through rank 0. `has_left`: whether a rank of another group has
  // left in an orderly way. `locations` must outlive this.
  PeerWatch(const GroupMemory& memory, const RankLocations& locations, int rank,
            std::function<bool(int rank)> has_left);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // DDL_ABORTED naming a rank whose process has ended without leaving, or that reported the communicator broken.
  // Cost: one poll(2).
  Status Check();

 private:
  struct Peer {
    int rank;
    int pid;
    int local_rank;  // -1: of another group
    int process;     // in processes_; -1: it cannot be seen from here, or the kernel has no pidfds
    bool gone = false;
  };
  bool HasDied(const Peer& peer) const;
  bool HasLeft(const Peer& peer) const;

  const GroupMemory& memory_;
  const RankLocations& locations_;
  const std::function<bool(int)> has_left_;
  std::vector<Peer> peers_;
  std::vector<pollfd> processes_;  // pidfds; -1 once the peer is gone
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_LIVENESS_PEER_WATCH_H_
