// PeerWatch: notices that a process of this host has died, at the next look, whatever killed it.
#ifndef KERAS_DDL_CORE_LIVENESS_PEER_WATCH_H_
#define KERAS_DDL_CORE_LIVENESS_PEER_WATCH_H_

#include <poll.h>

#include <functional>
#include <vector>

#include "base/status.h"
#include "liveness/places.h"
#include "shm/group_memory.h"

namespace ddl {

class PeerWatch {
 public:
  // Watches the ranks of this group: by their processes in this pid namespace, else by what they hold in the group's
  // memory (shm/life_lock.h). Rank 0, wherever it shows no memory, also watches all others in its pid namespace, and
  // they rank 0: through it all of them hear of a death. `has_left`: whether a rank of another group has said goodbye.
  // `places` must outlive this.
  PeerWatch(const GroupMemory& memory, const Places& places, int rank, std::function<bool(int rank)> has_left);
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
    int process;     // in processes_; -1: it can not be seen from here, or the kernel has no pidfds
    bool gone = false;
  };
  bool HasDied(const Peer& peer) const;
  bool HasLeft(const Peer& peer) const;

  const GroupMemory& memory_;
  const Places& places_;
  const std::function<bool(int)> has_left_;
  std::vector<Peer> peers_;
  std::vector<pollfd> processes_;  // pidfds; -1 once the peer is gone
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_LIVENESS_PEER_WATCH_H_
