// PeerWatch: notices that a process of this host has died, within a poll, whatever killed it.
#ifndef KERAS_DDL_CORE_PEER_WATCH_H_
#define KERAS_DDL_CORE_PEER_WATCH_H_

#include <vector>

#include "group_memory.h"
#include "places.h"
#include "status.h"

namespace ddl {

class PeerWatch {
 public:
  // Watches the processes of this group that are beside this one. `places` must outlive this.
  PeerWatch(const GroupMemory& memory, const Places& places);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // DDL_ABORTED naming a rank whose process has ended without leaving, or that reported the communicator broken.
  // Cost: one poll(2).
  Status Check();

 private:
  struct Peer {
    int local_rank;
    int rank;
    int pid;
    int fd;  // pidfd; -1 where the kernel has none
  };
  const GroupMemory& memory_;
  const Places& places_;
  std::vector<Peer> peers_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_PEER_WATCH_H_
