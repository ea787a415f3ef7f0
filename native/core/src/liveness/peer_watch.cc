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

PeerWatch::PeerWatch(const GroupMemory& memory, const RankLocations& locations, int rank,
                     std::function<bool(int rank)> has_left)
    : memory_(memory), locations_(locations), has_left_(std::move(has_left)) {
  const std::vector<int>& members = memory.members();
  for (int other = 0; other < locations.size(); ++other) {
    const auto at = std::find(members.begin(), members.end(), other);
    const bool member = at != members.end();
    const bool visible = locations.at(other).same_pid_namespace;
    if (other == rank || (!member && (!visible || (rank != 0 && other != 0)))) continue;
    // A pidfd becomes readable when the process ends, a zombie included, and cannot be fooled by a reused pid.
    const int pid = visible ? locations.at(other).pid : 0;
    const int fd = visible ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0u)) : -1;
    peers_.push_back({other, pid, member ? static_cast<int>(at - members.begin()) : -1,
                      fd >= 0 ? static_cast<int>(processes_.size()) : -1});
    if (fd >= 0) processes_.push_back({fd, POLLIN, 0});
  }
}

PeerWatch::~PeerWatch() {
  for (const pollfd& process : processes_) {
    if (process.fd >= 0) close(process.fd);
  }
}

Status PeerWatch::Check() {
  for (int local = 0; local < memory_.local_size(); ++local) {
    if (local == memory_.local_rank()) continue;
    const RankBlock& block = memory_.block(local);
    if (block.state.load(std::memory_order_acquire) == kBroken) return DecodeReason(block.reason);
  }
  if (!processes_.empty() && poll(processes_.data(), processes_.size(), 0) < 0) {
    for (pollfd& process : processes_) process.revents = 0;  // found at the next check
  }
  for (Peer& peer : peers_) {
    if (peer.gone || !HasDied(peer)) continue;
    // Checked last: a rank that leaves says so before its process ends.
    peer.gone = HasLeft(peer);
    if (!peer.gone) {
      return {
          DDL_ABORTED,
          locations_.Describe(peer.rank) +
              " died. See the end of its output. A process that the kernel killed for lack of memory (see dmesg), or "
              "that called os._exit, leaves none.",
          {{peer.rank, DDL_RANK_DIED}}};
    }
    if (peer.process >= 0) close(std::exchange(processes_[static_cast<size_t>(peer.process)].fd, -1));
  }
  return {};
}

bool PeerWatch::HasDied(const Peer& peer) const {
  if (peer.process >= 0) return processes_[static_cast<size_t>(peer.process)].revents != 0;
  if (peer.local_rank >= 0 && LifeLock::IsBroken(memory_.block(peer.local_rank))) return true;
  return peer.pid > 0 && kill(peer.pid, 0) != 0 && errno == ESRCH;  // no pidfd: an old kernel, or too many files
}

bool PeerWatch::HasLeft(const Peer& peer) const {
  if (peer.local_rank < 0) return has_left_(peer.rank);
  return memory_.block(peer.local_rank).state.load(std::memory_order_acquire) != kAlive;
}

}  // namespace ddl
