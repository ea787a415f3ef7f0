#include "shm/peer_memory.h"

#include <limits.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "base/gather.h"
#include "base/proc_files.h"
#include "base/waiter.h"

namespace ddl {
namespace {

// How long a rank that gave up waits for another rank's write before it checks the state of that process, and how long
// it waits at most.
constexpr double kTypicalWriteSeconds = 0.1;
constexpr double kMaxWriteSeconds = 30;

// What the other ranks read and write as a test.
struct ProbeWord {
  uint64_t secret;  // as in the rank's block: proves that this is the right process
  uint64_t marks;   // written by the other ranks
};

using Move = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);

// Transfers everything that the lists describe, continuing partial transfers. Returns 0 or errno.
int MoveAll(Move move, pid_t pid, std::vector<iovec>& local, std::vector<iovec>& remote) {
  size_t at_local = 0;
  size_t at_remote = 0;
  const auto advance = [](std::vector<iovec>& list, size_t* at, size_t bytes) {
    while (*at < list.size() && bytes >= list[*at].iov_len) bytes -= list[(*at)++].iov_len;
    if (*at == list.size()) return;
    list[*at].iov_base = static_cast<char*>(list[*at].iov_base) + bytes;
    list[*at].iov_len -= bytes;
  };
  while (at_local < local.size() && at_remote < remote.size()) {
    const ssize_t moved = move(pid, &local[at_local], std::min<size_t>(local.size() - at_local, IOV_MAX),
                               &remote[at_remote], std::min<size_t>(remote.size() - at_remote, IOV_MAX), 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved < 0 ? errno : EFAULT;
    advance(local, &at_local, static_cast<size_t>(moved));
    advance(remote, &at_remote, static_cast<size_t>(moved));
  }
  return 0;
}

// Whether the process is stopped or has ended.
bool IsStopped(pid_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  const std::string state = ProcessStat(pid);
  return !state.empty() && std::strchr("TtZX", state[0]) != nullptr;
}

uint64_t NewSecret() {
  uint64_t secret = 0;
  if (syscall(SYS_getrandom, &secret, sizeof secret, 0u) != sizeof secret) {
    secret = static_cast<uint64_t>(Now() * 1e9) * 0x9e3779b97f4a7c15u ^ static_cast<uint64_t>(getpid());
  }
  return secret | 1;
}

// Whether this process can reach the process of `block`: reads its word, and writes a mark beside it.
bool CanReach(const RankBlock& block) {
  const uint64_t address = block.probe_address.load(std::memory_order_relaxed);
  const pid_t pid = block.pid.load(std::memory_order_relaxed);
  ProbeWord word{};
  std::vector<iovec> local{{&word, sizeof word}};
  std::vector<iovec> remote{{reinterpret_cast<void*>(address), sizeof word}};
  if (MoveAll(process_vm_readv, pid, local, remote) != 0) return false;
  // In another process-id namespace the same number can be another process, into which nothing must be written.
  if (word.secret != block.probe_secret.load(std::memory_order_relaxed)) return false;
  word.marks = 1;
  local = {{&word.marks, sizeof word.marks}};
  remote = {{reinterpret_cast<void*>(address + offsetof(ProbeWord, marks)), sizeof word.marks}};
  return MoveAll(process_vm_writev, pid, local, remote) == 0;
}

}  // namespace

Status PeerMemory::Probe(const ddl_transport& transport, bool wanted, GroupMemory& memory) {
  const auto& members = memory.members();
  auto word = std::make_unique<ProbeWord>(ProbeWord{NewSecret(), 0});
  RankBlock& own = memory.own();
  own.probe_address.store(reinterpret_cast<uint64_t>(word.get()), std::memory_order_relaxed);
  own.probe_secret.store(word->secret, std::memory_order_relaxed);
  // After the first exchange all words are in place. The second exchange shares each rank's result, and after it `word`
  // may be freed.
  uint8_t mine = wanted ? 1 : 0;
  std::vector<uint8_t> reached;
  Status status = Gather(transport, mine, &reached);
  for (int local = 0; status.ok() && wanted && local < memory.local_size(); ++local) {
    if (local != memory.local_rank() && !CanReach(memory.block(local))) mine = 0;
  }
  if (status.ok()) status = Gather(transport, mine, &reached);
  if (!status.ok()) {
    word.release();  // another rank may be about to write there
    return status;
  }
  memory.set_reachable(members.size() > 1 && std::all_of(members.begin(), members.end(), [&](int rank) {
                         return reached[static_cast<size_t>(rank)] != 0;
                       }));
  return {};
}

bool PeerMemory::Accessible(std::vector<iovec>& bytes) {
  std::vector<char> copies(bytes.size());
  std::vector<iovec> local{{copies.data(), copies.size()}};
  return MoveAll(process_vm_readv, getpid(), local, bytes) == 0;
}

Status PeerMemory::Read(int local_rank, std::vector<iovec>& local, std::vector<iovec>& remote) const {
  const pid_t pid = memory_.block(local_rank).pid.load(std::memory_order_relaxed);
  const int error = MoveAll(process_vm_readv, pid, local, remote);
  return error == 0 ? Status() : AccessFailed("read", local_rank, error);
}

Status PeerMemory::Write(int local_rank, std::vector<iovec>& local, std::vector<iovec>& remote) const {
  // Either this rank sees that the other has revoked access, or the other sees this flag, because all four accesses are
  // sequentially consistent.
  RankBlock& own = memory_.own();
  own.writes_to.store(static_cast<uint32_t>(local_rank) + 1, std::memory_order_seq_cst);
  const RankBlock& block = memory_.block(local_rank);
  Status status;
  if (block.access_revoked.load(std::memory_order_seq_cst) != 0) {
    status = PeerGaveUp(local_rank);
  } else if (const int error = MoveAll(process_vm_writev, block.pid.load(std::memory_order_relaxed), local, remote)) {
    status = AccessFailed("write", local_rank, error);
  }
  own.writes_to.store(0, std::memory_order_release);
  return status;
}

Status PeerMemory::PeerGaveUp(int local_rank) const {
  const int rank = GlobalRank(local_rank);
  return {DDL_ABORTED, "rank " + std::to_string(rank) + " gave up the collective", {{rank, DDL_RANK_NAMED}}};
}

Status PeerMemory::AccessFailed(const char* what, int local_rank, int error) const {
  // Its buffers may already be gone.
  if (memory_.block(local_rank).access_revoked.load(std::memory_order_seq_cst) != 0) return PeerGaveUp(local_rank);
  const int number = GlobalRank(local_rank);
  const std::string rank = "rank " + std::to_string(number);
  if (error == ESRCH) return {DDL_ABORTED, rank + " died. See the end of its output.", {{number, DDL_RANK_DIED}}};
  return {DDL_INTERNAL,
          std::string("could not ") + what + " the memory of " + rank + " (process_vm_" + what +
              "v: " + std::strerror(error) + "). Set KERAS_DDL_CMA=0 on all ranks to use shared memory instead.",
          {{number, DDL_RANK_NAMED}}};
}

int PeerMemory::GlobalRank(int local_rank) const { return memory_.members()[static_cast<size_t>(local_rank)]; }

void PeerMemory::RevokeAccess() const {
  memory_.own().access_revoked.store(1, std::memory_order_seq_cst);
  const auto me = static_cast<uint32_t>(memory_.local_rank()) + 1;
  const double start = Now();
  for (int local = 0; local < memory_.local_size(); ++local) {
    const RankBlock& block = memory_.block(local);
    while (block.writes_to.load(std::memory_order_seq_cst) == me) {
      const double waited = Now() - start;
      if (waited > kMaxWriteSeconds) break;
      if (waited > kTypicalWriteSeconds && IsStopped(block.pid.load(std::memory_order_relaxed))) break;
      const timespec pause{0, waited > kTypicalWriteSeconds ? 5'000'000 : 50'000};
      nanosleep(&pause, nullptr);
    }
  }
}

}  // namespace ddl
