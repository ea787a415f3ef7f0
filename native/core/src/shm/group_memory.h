// The memory that the ranks of one group (one host, or one forced group of a host) share.
//
// In production it is an anonymous memfd of the group's leader, which the other ranks open through /proc: it has no
// name, so nothing is left in /dev/shm whichever process dies, and a container's small /dev/shm does not limit it.
// Where /proc/<pid>/fd of another rank cannot be opened (separate process-id namespaces) a POSIX shared memory object
// is used instead and unlinked as soon as every rank has attached. Ranks that are threads get the block from the
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
// Bytes of one direction of the control plane between a rank and the leader of its group.
constexpr size_t kMailboxBytes = 64 * 1024;

enum RankState : uint32_t {
  kAlive = 0,
  kLeft = 1,    // after an orderly ddl_destroy
  kBroken = 2,  // the communicator can no longer be used
};

// Single producer, single consumer ring of bytes.
struct Mailbox {
  alignas(64) std::atomic<uint64_t> head;  // bytes ever written
  alignas(64) std::atomic<uint64_t> tail;  // bytes ever read
  alignas(64) char data[kMailboxBytes];
};

// What a rank publishes at a rendezvous (engine/inline_rendezvous.h): a collective that its calling thread is ready to
// run.
struct RendezvousRecord {
  uint64_t must_agree[6];  // see engine/inline.cc
  uint64_t rows;
  uint64_t scheme;  // of an all-reduce through the slots, as local rank 0 proposes it (scheme.h)
};

// What a rank runs next of a plan, or what several of them do; see engine/plan_lane.h.
struct PlanPost {
  uint64_t equal;    // 0: nothing, or not the same
  uint64_t number;   // of the run, the largest
  uint64_t what[9];  // must be equal
};

// Data up to this size is sent with the record; so are the splits of an all_to_all.
constexpr size_t kEagerBytes = 64 * 1024;

// What one rank shares with the others of its group. Zero is a valid initial state of every field but `life`.
struct RankBlock {
  // Doorbell: incremented and, if `sleeping`, woken (futex) after any change that this rank's thread must handle.
  alignas(64) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleeping;
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> state;  // RankState; set after `reason`
  char reason[1024];            // why this rank gave up (kBroken), for error messages on the others
  // Milliseconds of the monotonic clock: when this rank last checked on the others, as it does many times a second; and
  // when it last warned about a collective that makes no progress.
  std::atomic<int64_t> alive_ms;
  std::atomic<int64_t> warned_ms;
  // Requests of this rank that go through the coordinator: while there are any, it takes part in no rendezvous.
  std::atomic<uint32_t> outstanding;
  // In rank 0's block: set while the coordinator remembers collectives that failed without some rank, and while some
  // rank has joined. A rendezvous would never complete then.
  std::atomic<uint32_t> no_rendezvous;
  // See peer_memory.h: the address of a word in this rank's own memory, and the secret that identifies it.
  std::atomic<uint64_t> probe_address;
  std::atomic<uint64_t> probe_secret;
  // Local rank + 1 of the rank into whose memory this one is writing; 0: none.
  alignas(64) std::atomic<uint32_t> writes_to;
  std::atomic<uint32_t> access_revoked;  // no other rank may write into this rank's memory any more
  // See life_lock.h.
  alignas(64) pthread_mutex_t life;
  std::atomic<uint32_t> life_state;
  alignas(64) std::atomic<uint64_t> rendezvous;  // in the leader's block; see engine/inline_rendezvous.h
  alignas(64) RendezvousRecord records[2];
  alignas(64) char eager[2][kEagerBytes];
  // Steps done, counted over the life of the group; see pipeline.h.
  alignas(64) std::atomic<uint64_t> ready;
  alignas(64) std::atomic<uint64_t> reduced;
  alignas(64) std::atomic<uint64_t> done;
  alignas(64) std::atomic<uint64_t> claimed;  // see ShmPipeline::Claim
  alignas(64) std::atomic<uint64_t> agreed;   // in local rank 0's block: agreements made; see ShmPipeline::Agree
  std::atomic<uint64_t> agreements[kSlots];
  // Rounds in which this rank has posted, and the last two posts. In the leader's block: rounds of which it knows that
  // they have begun elsewhere, and those that have ended with which outcome, where there are several groups.
  alignas(64) std::atomic<uint64_t> plan_posted;
  std::atomic<uint64_t> plan_begun;
  std::atomic<uint64_t> plan_decided;
  alignas(64) PlanPost plan_posts[2];
  alignas(64) PlanPost plan_outcomes[2];
  Mailbox to_leader;
  Mailbox from_leader;
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
