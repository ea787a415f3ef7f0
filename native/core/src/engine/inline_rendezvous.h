// InlineRendezvous: how the threads that wait for a collective carry it out themselves, without the communication
// threads and without asking the coordinator.
//
// In a group of all ranks, a rank that has nothing else outstanding writes what it has to do on its card, adds small
// data, and arrives at the current rendezvous. When all ranks have arrived it is complete: everyone reads all cards,
// and since everyone reads the same cards, everyone comes to the same verdict - carry the collective out now, or leave
// it to the coordinator. A rank that does not want to wait longer withdraws, which succeeds unless the
// rendezvous is complete already: one atomic word decides, so no two ranks can differ about it.
//
// Cost when all ranks come together: one atomic addition per rank and the reading of each other's cards, about a
// microsecond where a round trip through communication threads and coordinator takes some fifty.
#ifndef KERAS_DDL_CORE_ENGINE_INLINE_RENDEZVOUS_H_
#define KERAS_DDL_CORE_ENGINE_INLINE_RENDEZVOUS_H_

#include <cstdint>

#include "shm/group_memory.h"

namespace ddl {

class InlineRendezvous {
 public:
  explicit InlineRendezvous(GroupMemory& memory) : memory_(memory) {}

  // The card and the buffer for small data (kEagerBytes) to fill in before Arrive.
  RendezvousCard& card() { return memory_.own().cards[number_ % 2]; }
  char* eager() { return memory_.own().eager[number_ % 2]; }

  // Returns true when this rank was the last: the rendezvous is complete.
  bool Arrive();
  // REQUIRES: arrived.
  bool Complete() const { return word().load(std::memory_order_acquire) >> 16 != number_; }
  // Takes the arrival back; false when the rendezvous is complete after all.
  bool Withdraw();

  // REQUIRES: complete, and not yet Closed. Whether all ranks wrote the same on the part of their cards that must be
  // equal.
  bool Agreed() const;
  const RendezvousCard& card_of(int local_rank) const { return memory_.block(local_rank).cards[number_ % 2]; }
  const char* eager_of(int local_rank) const { return memory_.block(local_rank).eager[number_ % 2]; }
  // This rank has read all it needs. Cards and data are overwritten two rendezvous later, which nobody can complete
  // before every rank has arrived at the next one: no further flag is needed.
  void Close() { ++number_; }

 private:
  // Number of the current rendezvous << 16 | ranks that have arrived at it.
  std::atomic<uint64_t>& word() const { return memory_.block(0).rendezvous; }

  GroupMemory& memory_;
  uint64_t number_ = 0;  // rendezvous completed so far, equal on all ranks
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_INLINE_RENDEZVOUS_H_
