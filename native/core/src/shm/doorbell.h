// How a communication thread sleeps and is woken: a futex on the `bell` of its RankBlock, which works across processes
// and costs the ringer one atomic add while nobody sleeps.
#ifndef KERAS_DDL_CORE_SHM_DOORBELL_H_
#define KERAS_DDL_CORE_SHM_DOORBELL_H_

#include <cstdint>

#include "shm/group_memory.h"

namespace ddl {

// Wakes the owner of `block`. Call after the new state is visible (stored with release order).
void RingBell(RankBlock& block);

// The bell's count; read it BEFORE checking for work, then sleep on that value: work that arrives in between is never
// missed.
inline uint32_t BellCount(const RankBlock& block) { return block.bell.load(std::memory_order_seq_cst); }

// Sleeps until the bell was rung since `seen`, or for `timeout_us` microseconds.
void SleepUntilRung(RankBlock& own, uint32_t seen, int64_t timeout_us);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_DOORBELL_H_
