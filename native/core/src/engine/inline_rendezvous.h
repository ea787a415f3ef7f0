// InlineRendezvous: lets the threads that wait for a collective run it themselves, without the communication threads
// and without asking the coordinator.
//
// In a group of all ranks, a rank that has nothing else outstanding writes its collective into its record, adds small
// data, and arrives at the current rendezvous. When all ranks have arrived it is complete. All ranks then read the same
// records and come to the same conclusion: run the collective now, or leave it to the coordinator. A rank whose
// patience ends withdraws, which succeeds unless the rendezvous is already complete. One atomic word decides, so no two
// ranks can disagree about it.
//
// Cost when all ranks arrive together: one atomic exchange per rank and reading each other's records, about a
// microsecond. A round trip through communication threads and coordinator takes about fifty.
#ifndef KERAS_DDL_CORE_ENGINE_INLINE_RENDEZVOUS_H_
#define KERAS_DDL_CORE_ENGINE_INLINE_RENDEZVOUS_H_

#include <cstdint>

#include "engine/engine_block.h"

namespace ddl {

class InlineRendezvous {
 public:
  explicit InlineRendezvous(GroupMemory& memory) : memory_(memory) {}

  // The record and the buffer for small data (kEagerBytes) to fill in before Arrive.
  RendezvousRecord& record() { return OwnBlock(memory_).records[number_ % 2]; }
  char* eager() { return OwnBlock(memory_).eager[number_ % 2]; }

  // Returns true when this rank was the last: the rendezvous is complete.
  bool Arrive();
  // REQUIRES: arrived.
  bool Complete() const { return word().load(std::memory_order_acquire) >> 16 != number_; }
  // Takes the arrival back. Returns false if the rendezvous is complete after all.
  bool Withdraw();

  // REQUIRES: complete, and not yet Closed. Whether the records of all ranks are equal where they must be.
  bool Agreed() const;
  const RendezvousRecord& record_of(int local_rank) const { return BlockOf(memory_, local_rank).records[number_ % 2]; }
  const char* eager_of(int local_rank) const { return BlockOf(memory_, local_rank).eager[number_ % 2]; }
  // Called when this rank has read all that it needs. Records and data are overwritten two rendezvous later, which
  // cannot complete before every rank has arrived at the next one, so no further flag is needed.
  void Close() { ++number_; }

 private:
  // Number of the current rendezvous << 16 | ranks that have arrived at it.
  std::atomic<uint64_t>& word() const { return BlockOf(memory_, 0).rendezvous; }

  GroupMemory& memory_;
  uint64_t number_ = 0;  // rendezvous completed so far, equal on all ranks
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_INLINE_RENDEZVOUS_H_
