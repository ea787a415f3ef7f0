// ShmPipeline: the steps on which every shared-memory algorithm is built.
//
// An array passes through the group's slots in steps of at most one slot. In each step a rank may fill its own slot
// (once all ranks have finished the previous step that used it: WaitFree), publishes it (MarkReady), reads the slots of
// others (WaitReady) and finishes (MarkDone). Steps are counted over the life of the group, equally on all ranks,
// because all ranks run the same collectives in the same order. Every rank marks every step, even those in which it has
// no data. A rank runs at most kSlots steps ahead of the slowest.
#ifndef KERAS_DDL_CORE_SHM_PIPELINE_H_
#define KERAS_DDL_CORE_SHM_PIPELINE_H_

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/view.h"
#include "base/waiter.h"
#include "kernels/views.h"
#include "shm/group_memory.h"
#include "shm/peer_memory.h"
#include "shm/tuner.h"

namespace ddl {

class ShmPipeline {
 public:
  ShmPipeline(GroupMemory& memory, Waiter& waiter)
      : memory_(memory),
        waiter_(waiter),
        tuner_(memory.local_size(), memory.slot_bytes(), memory.reachable()),
        peers_(memory) {}

  int rank() const { return memory_.local_rank(); }
  int size() const { return memory_.local_size(); }
  size_t slot_bytes() const { return memory_.slot_bytes(); }
  char* slot(int local_rank, uint64_t step) const { return memory_.slot(local_rank, step); }

  // Reserves `steps` consecutive steps; returns the first.
  uint64_t Reserve(uint64_t steps) {
    const uint64_t first = next_;
    next_ += steps;
    return first;
  }

  Status WaitFree(uint64_t step) {
    if (step < free_before_) return {};
    DDL_RETURN_IF_ERROR(WaitAll(&RankBlock::done, step - kSlots + 1));
    // Reading a counter costs a cache line, but the other ranks are usually further, so one look serves several steps.
    uint64_t finished = ~uint64_t{0};
    for (int local = 0; local < size(); ++local) {
      if (local != rank()) finished = std::min(finished, memory_.block(local).done.load(std::memory_order_acquire));
    }
    free_before_ = finished + kSlots;
    return {};
  }
  void MarkReady(uint64_t step) { memory_.own().ready.store(step + 1, std::memory_order_release); }
  Status WaitReady(uint64_t step) { return WaitAll(&RankBlock::ready, step + 1); }
  Status WaitReadyOf(int local_rank, uint64_t step) { return WaitOne(&RankBlock::ready, local_rank, step + 1); }
  void MarkReduced(uint64_t step) { memory_.own().reduced.store(step + 1, std::memory_order_release); }
  Status WaitReducedOf(int local_rank, uint64_t step) { return WaitOne(&RankBlock::reduced, local_rank, step + 1); }
  // All ranks have finished the step.
  Status WaitDone(uint64_t step) { return WaitAll(&RankBlock::done, step + 1); }
  void MarkDone(uint64_t step) { memory_.own().done.store(step + 1, std::memory_order_release); }

  // Local rank 0's `mine`, on every rank. COLLECTIVE; must be followed by a step.
  Status Agree(uint64_t mine, uint64_t* agreed) {
    const uint64_t n = agreements_++;
    if (rank() == 0) {
      // The other ranks have read the overwritten data, because they have finished the following step.
      if (n >= kSlots) DDL_RETURN_IF_ERROR(WaitFree(agreed_before_[n % kSlots] + kSlots));
      agreed_before_[n % kSlots] = next_;
      memory_.own().agreements[n % kSlots].store(mine, std::memory_order_relaxed);
      memory_.own().agreed.store(n + 1, std::memory_order_release);
      *agreed = mine;
      return {};
    }
    DDL_RETURN_IF_ERROR(WaitOne(&RankBlock::agreed, 0, n + 1));
    *agreed = memory_.block(0).agreements[n % kSlots].load(std::memory_order_relaxed);
    return {};
  }
  Tuner& tuner() { return tuner_; }
  const PeerMemory& peers() const { return peers_; }
  // Work of a step that any rank may do: each rank's part in pieces, claimed by number. A rank resets its own counter
  // before MarkReady, in a step that ends with WaitDone.
  void ResetClaims() { memory_.own().claimed.store(0, std::memory_order_relaxed); }
  uint64_t Claim(int local_rank) { return memory_.block(local_rank).claimed.fetch_add(1, std::memory_order_relaxed); }
  // Private memory of this rank for data read from others; valid until the next call.
  char* RecvScratch(size_t bytes) {
    if (recv_scratch_.size() < bytes) recv_scratch_.resize(bytes);
    return recv_scratch_.data();
  }
  // Not OK: why waiting for the others is pointless.
  Status Health() { return waiter_.Health(); }
  Status CheckHealthIfDue() { return waiter_.CheckHealthIfDue(Now()); }

  // Where whole lines cannot be written, large slots are written past the caches: a line that another core has read
  // is slow to get back, and slow to read once more from a core that does not share a cache.
  static Store SlotStore(uint64_t bytes) {
    if (HasRepMovsb()) return Store::kRepMovsb;
    return bytes >= kStreamSlotBytes ? Store::kStreaming : Store::kCached;
  }
  // Results larger than the caches would be evicted before they are read.
  static Store ResultStore(uint64_t bytes) { return bytes >= kStreamResultBytes ? Store::kStreaming : Store::kCached; }

 private:
  static constexpr uint64_t kStreamSlotBytes = 256 * 1024;
  static constexpr uint64_t kStreamResultBytes = 4 * 1024 * 1024;

  using Counter = std::atomic<uint64_t> RankBlock::*;

  Status WaitOne(Counter counter, int local_rank, uint64_t value) {
    const std::atomic<uint64_t>& at = memory_.block(local_rank).*counter;
    return waiter_.Until([&] { return at.load(std::memory_order_acquire) >= value; },
                         [&] { return "rank " + std::to_string(memory_.members()[static_cast<size_t>(local_rank)]); });
  }
  Status WaitAll(Counter counter, uint64_t value) {
    for (int local = 0; local < size(); ++local) {
      if (local != rank()) DDL_RETURN_IF_ERROR(WaitOne(counter, local, value));
    }
    return {};
  }

  GroupMemory& memory_;
  Waiter& waiter_;
  Tuner tuner_;
  PeerMemory peers_;
  std::vector<char> recv_scratch_;
  uint64_t next_ = 0;
  uint64_t free_before_ = kSlots;  // what all ranks are known to have finished, and kSlots
  uint64_t agreements_ = 0;
  std::array<uint64_t, kSlots> agreed_before_{};  // the step that followed
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_PIPELINE_H_
