#include "peer_watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace ddl {

PeerWatch::PeerWatch(const GroupMemory& memory, const Places& places) : memory_(memory), places_(places) {
  for (int local = 0; local < memory.local_size(); ++local) {
    const int rank = memory.members()[static_cast<size_t>(local)];
    const int pid = places.at(rank).pid;
    if (!places.at(rank).beside) continue;
    // A pidfd becomes readable when the process ends, a zombie included, and can not be fooled by a reused pid.
    peers_.push_back({local, rank, pid, static_cast<int>(syscall(SYS_pidfd_open, pid, 0u))});
  }
}

PeerWatch::~PeerWatch() {
  for (const Peer& peer : peers_) {
    if (peer.fd >= 0) close(peer.fd);
  }
}

Status PeerWatch::Check() {
  for (int local = 0; local < memory_.local_size(); ++local) {
    if (local == memory_.local_rank()) continue;
    const RankBlock& block = memory_.block(local);
    if (block.state.load(std::memory_order_acquire) == kBroken) return {DDL_ABORTED, block.reason};
  }
  for (const Peer& peer : peers_) {
    bool dead = false;
    if (peer.fd >= 0) {
      pollfd poll_fd{peer.fd, POLLIN, 0};
      dead = poll(&poll_fd, 1, 0) > 0;
    } else {
      dead = kill(peer.pid, 0) != 0 && errno == ESRCH;
    }
    // `state` is looked at last: a rank that leaves sets it before its process ends.
    if (dead && memory_.block(peer.local_rank).state.load(std::memory_order_acquire) == kAlive) {
      return {DDL_ABORTED,
              places_.Of(peer.rank) +
                  " died. Look at the end of its output; a process killed for memory leaves none (dmesg tells)."};
    }
  }
  return {};
}

}  // namespace ddl
