// The memory that the ranks of one group (one host, or one forced group of a host) share.
//
// In production it is an anonymous memfd of the group's leader, which the other ranks open through /proc: it has no
// name, so nothing is left in /dev/shm whichever process dies, and a container's small /dev/shm does not limit it.
// If /proc/<pid>/fd of another rank cannot be opened (separate process-id namespaces), a POSIX shared memory object is
// used instead, and unlinked as soon as every rank has attached. Ranks that are threads get the block from the
// transport (ddl_transport::share).
#ifndef KERAS_DDL_CORE_SHM_GROUP_MEMORY_H_
#define KERAS_DDL_CORE_SHM_GROUP_MEMORY_H_

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

// Steps that a rank may be ahead of the slowest reader of its slots.
constexpr uint64_t kSlots = 4;
// Bytes of a rank's block that upper layers lay out: control/mailbox.h, engine/engine_block.h.
constexpr size_t kControlBytes = 129 * 1024;
constexpr size_t kEngineBytes = 130 * 1024;

enum RankState : uint32_t {
  kAlive = 0,
  kLeft = 1,    // after an orderly ddl_close
  kBroken = 2,  // the communicator can no longer be used
};

// What one rank shares with the others of its group. Zero is a valid initial state of every field but `life`.
struct RankBlock {
  // Doorbell: incremented and, if `sleeping`, woken (futex) after any change that this rank's thread must handle.
  alignas(64) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleeping;
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> state;  // RankState; set after `reason`
  char reason[1024];            // why this rank gave up (kBroken), for error messages on the others; written once
  // Milliseconds of the monotonic clock: when this rank last checked on the others, as it does many times a second; and
  // when it last warned about a collective that makes no progress.
  std::atomic<int64_t> alive_ms;
  std::atomic<int64_t> warned_ms;
  // See peer_memory.h: the address of a word in this rank's own memory, and the secret that identifies it.
  std::atomic<uint64_t> probe_address;
  std::atomic<uint64_t> probe_secret;
  // Local rank + 1 of the rank into whose memory this one is writing; 0: none.
  alignas(64) std::atomic<uint32_t> writes_to;
  std::atomic<uint32_t> access_revoked;  // no other rank may write into this rank's memory any more
  // See life_lock.h.
  alignas(64) pthread_mutex_t life;
  std::atomic<uint32_t> life_state;
  // Steps done, counted over the life of the group; see pipeline.h.
  alignas(64) std::atomic<uint64_t> ready;
  alignas(64) std::atomic<uint64_t> reduced;
  alignas(64) std::atomic<uint64_t> done;
  alignas(64) std::atomic<uint64_t> claimed;  // see ShmPipeline::Claim
  alignas(64) std::atomic<uint64_t> agreed;   // in local rank 0's block: agreements made; see ShmPipeline::Agree
  std::atomic<uint64_t> agreements[kSlots];
  alignas(64) char control[kControlBytes];
  alignas(64) char engine[kEngineBytes];
};

class GroupMemory {
 public:
  // COLLECTIVE over all ranks of the transport. `group[r]`: leader of rank r's group. `slot_bytes`: a multiple of 4096.
  static Status Create(const ddl_transport& transport, const std::vector<int>& group, size_t slot_bytes,
                       std::unique_ptr<GroupMemory>* out);
  ~GroupMemory();
  GroupMemory(const GroupMemory&) = delete;
  GroupMemory& operator=(const GroupMemory&) = delete;

  int local_rank() const { return local_rank_; }
  int local_size() const { return static_cast<int>(members_.size()); }
  // Global ranks of the group, ascending; index: local rank.
  const std::vector<int>& members() const { return members_; }
  RankBlock& block(int local_rank) const { return blocks_[local_rank]; }
  RankBlock& own() const { return blocks_[local_rank_]; }

  // Slot of `local_rank` for step `step` (slots are reused every kSlots steps).
  char* slot(int local_rank, uint64_t step) const {
    return slots_ + (static_cast<uint64_t>(local_rank) * kSlots + step % kSlots) * slot_bytes_;
  }
  size_t slot_bytes() const { return slot_bytes_; }
  // "memfd", "shm_open", "threads" or "private" (a group of one).
  const char* kind() const { return kind_; }
  // Whether every rank of the group can read and write the memory of every other (peer_memory.h).
  bool reachable() const { return reachable_; }
  void set_reachable(bool reachable) { reachable_ = reachable; }

 private:
  GroupMemory() = default;
  Status Map(int fd, size_t bytes);
  void Unmap();
  // Both COLLECTIVE over all ranks of the transport. *everywhere: whether all groups have their memory.
  Status AttachMemfd(const ddl_transport& transport, int leader, size_t bytes, bool* everywhere);
  Status AttachNamed(const ddl_transport& transport, int leader, size_t bytes);

  void* base_ = nullptr;
  size_t mapped_bytes_ = 0;  // 0: not ours to unmap
  RankBlock* blocks_ = nullptr;
  char* slots_ = nullptr;
  size_t slot_bytes_ = 0;
  int local_rank_ = 0;
  std::vector<int> members_;
  const char* kind_ = "private";
  bool reachable_ = false;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_GROUP_MEMORY_H_
