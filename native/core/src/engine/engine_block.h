// EngineBlock: what the engine of a rank publishes to the ranks of its group, in the group's memory.
#ifndef KERAS_DDL_CORE_ENGINE_ENGINE_BLOCK_H_
#define KERAS_DDL_CORE_ENGINE_ENGINE_BLOCK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm/group_memory.h"

namespace ddl {

// What a rank publishes at a rendezvous (inline_rendezvous.h): a collective that its calling thread is ready to run.
struct RendezvousRecord {
  uint64_t must_agree[6];  // see inline_path.cc
  uint64_t rows;
  uint64_t scheme;  // of an all-reduce through the slots, as local rank 0 proposes it (shm/scheme.h)
};

// The collective of a plan that a rank runs next, or the posts of several ranks combined; see plan_lane.h.
struct PlanPost {
  uint64_t equal;    // 0: a rank has nothing to run, or they differ
  uint64_t number;   // of the run; the largest
  uint64_t what[9];  // plan, index, name, terms: must be equal
};

// Data up to this size is sent with the record; so are the splits of an all_to_all.
constexpr size_t kEagerBytes = 64 * 1024;

// Zero is a valid initial state of every field.
struct EngineBlock {
  // Requests of this rank that were submitted and have not ended. While there are any, it takes part in no rendezvous.
  alignas(64) std::atomic<uint32_t> outstanding;
  // Requests with small data that wait in this rank's plan. While there are any, it takes part in no rendezvous,
  // either.
  std::atomic<uint32_t> small_planned;
  // In rank 0's block: set while the coordinator remembers collectives that failed without some rank, and while some
  // rank has joined. A rendezvous would never complete then.
  std::atomic<uint32_t> no_rendezvous;
  // In local rank 0's block: see inline_rendezvous.h.
  alignas(64) std::atomic<uint64_t> rendezvous;
  alignas(64) RendezvousRecord records[2];
  alignas(64) char eager[2][kEagerBytes];
  // Rounds in which this rank has posted, and the last two posts. In the leader's block, if there are several groups:
  // rounds that it knows to have begun in other groups, rounds that have ended, and the last two outcomes.
  alignas(64) std::atomic<uint64_t> plan_posted;
  std::atomic<uint64_t> plan_begun;
  std::atomic<uint64_t> plan_decided;
  alignas(64) PlanPost plan_posts[2];
  alignas(64) PlanPost plan_outcomes[2];
};
static_assert(sizeof(EngineBlock) <= kEngineBytes, "raise kEngineBytes");

inline EngineBlock& EngineBlockOf(RankBlock& block) { return *reinterpret_cast<EngineBlock*>(block.engine); }
// Of this rank, or of another rank of its group.
inline EngineBlock& OwnBlock(GroupMemory& memory) { return EngineBlockOf(memory.own()); }
inline EngineBlock& BlockOf(GroupMemory& memory, int local_rank) { return EngineBlockOf(memory.block(local_rank)); }

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_ENGINE_BLOCK_H_
