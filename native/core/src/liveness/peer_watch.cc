#include "liveness/peer_watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/text.h"
#include "shm/life_lock.h"

namespace ddl {

PeerWatch::PeerWatch(const GroupMemory& memory, const Places& places, int rank, std::function<bool(int rank)> has_left)
    : memory_(memory), places_(places), has_left_(std::move(has_left)) {
  const std::vector<int>& members = memory.members();
  for (int other = 0; other < places.size(); ++other) {
    const auto at = std::find(members.begin(), members.end(), other);
    const bool member = at != members.end();
    const bool visible = places.at(other).same_pid_namespace;
    if (other == rank || (!member && (!visible || (rank != 0 && other != 0)))) continue;
    // A pidfd becomes readable when the process ends, a zombie included, and can not be fooled by a reused pid.
    const int pid = places.at(other).pid;
    peers_.push_back({other, pid, visible ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0u)) : -1,
                      member ? static_cast<int>(at - members.begin()) : -1});
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
    if (block.state.load(std::memory_order_acquire) == kBroken) return DecodeReason(block.reason);
  }
  for (Peer& peer : peers_) {
    if (peer.gone) continue;
    bool dead = false;
    if (peer.fd >= 0) {
      pollfd poll_fd{peer.fd, POLLIN, 0};
      dead = poll(&poll_fd, 1, 0) > 0;
    } else if (peer.local_rank >= 0) {
      dead = LifeLock::IsBroken(memory_.block(peer.local_rank));
    } else {
      dead = kill(peer.pid, 0) != 0 && errno == ESRCH;
    }
    if (!dead) continue;
    // Looked at last: a rank that leaves says so before its process ends.
    peer.gone = HasLeft(peer);
    if (!peer.gone) {
      return {DDL_ABORTED,
              places_.Of(peer.rank) +
                  " died. Look at the end of its output; a process killed for memory leaves none (dmesg tells)."};
    }
  }
  return {};
}

bool PeerWatch::HasLeft(const Peer& peer) const {
  if (peer.local_rank < 0) return has_left_(peer.rank);
  return memory_.block(peer.local_rank).state.load(std::memory_order_acquire) != kAlive;
}

}  // namespace ddl
