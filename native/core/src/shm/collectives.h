// Collectives among the ranks of one group, through its shared memory. All are COLLECTIVE over the group: equal counts
// and reductions on all its ranks. `in` and `out` of a call are equal piece by piece or do not overlap.
// N: bytes of one rank's data, L: ranks of the group. Bytes are those moved by one rank's core.
#ifndef KERAS_DDL_CORE_SHM_COLLECTIVES_H_
#define KERAS_DDL_CORE_SHM_COLLECTIVES_H_

#include <optional>
#include <vector>

#include "base/range.h"
#include "shm/pipeline.h"

namespace ddl {

// all_reduce.cc. Direct: every rank reads all slots: 1 write + L reads + 1 write of N; one wait per step.
// Split: reduce-scatter then all-gather inside each step (Rabenseifner's scheme in shared memory): about
// 1 + 1/L writes to slots, 2 reads, 1 write of N; two waits per step.
// cma_all_reduce.cc, if ranks can reach each other's memory. CMA: like split, without slots.
// Measurements decide which of them is used and how memory is written (tuned.h). `agreed`: see there.
Status ShmAllReduce(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction,
                    const std::optional<Scheme>& agreed = {});

// The parts of ShmAllReduce. SlotAllReduce: direct or split.
Status SlotAllReduce(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction,
                     const Scheme& scheme);
Status CmaAllReduce(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction,
                    uint64_t chunk_bytes);

// Local rank j's shard of n elements among `size` ranks; begins on a cache line.
Range ShardOf(int j, int size, uint64_t n, size_t element_bytes);

// parts[j] (one view per local rank, part of this rank's input) is reduced into rank j's `out`. reduce_scatter.cc,
// through slots: (L-1)/L N written to them, as much read, N/L written; one wait per step. cma_halves.cc: (L-1)/L N read
// from the others' inputs, N/L written; two waits. Measurements decide which of them is used (tuned.h).
Status ShmReduceScatter(ShmPipeline& pipeline, const std::vector<View>& parts, const View& out,
                        const Reduction& reduction);
Status SlotReduceScatter(ShmPipeline& pipeline, const std::vector<View>& parts, const View& out,
                         const Reduction& reduction, const Scheme& scheme);
Status CmaReduceScatter(ShmPipeline& pipeline, const std::vector<View>& parts, const View& out,
                        const Reduction& reduction, uint64_t chunk_bytes);

// `in` of local rank j lands in outs[j] on every rank. all_gather.cc, through slots: N written, sum of the others' N
// copied; one wait per step. cma_halves.cc: sum of the others' N copied; two waits.
Status ShmAllGather(ShmPipeline& pipeline, const View& in, const std::vector<View>& outs);
Status SlotAllGather(ShmPipeline& pipeline, const View& in, const std::vector<View>& outs, const Scheme& scheme);
Status CmaAllGather(ShmPipeline& pipeline, const View& in, const std::vector<View>& outs, uint64_t chunk_bytes);

// all_to_all.cc. parts[j] of local rank i lands in outs[i] of local rank j, which has the same length. Lengths differ
// between pairs, and no rank needs to know the lengths of other pairs. A rank writes its data for others to its slots,
// from which they copy it once. All views are of bytes (element_bytes 1).
Status ShmAllToAll(ShmPipeline& pipeline, const std::vector<View>& parts, const std::vector<View>& outs);

// broadcast.cc. `in` of local rank `root` lands in `out` on every rank; `in` is read on the root only.
Status ShmBroadcast(ShmPipeline& pipeline, int root, const View& in, const View& out);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_COLLECTIVES_H_
