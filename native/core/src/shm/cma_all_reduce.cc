// Cross-memory-attach (CMA) all-reduce, inside a group in which ranks can reach each other's memory (peer_memory.h):
// Rabenseifner's scheme, reduce-scatter then all-gather, with one-sided transfers directly between the buffers.
//
// Each rank owns a shard of the elements. Chunk by chunk, it reads this shard from the other ranks' inputs, adds them
// to its own, and writes the sum into all outputs while the sum is in its cache. A rank that has finished takes over
// chunks from ranks that have not. Only one rank reads or writes the elements of a chunk. So the ranks only synchronize
// twice, at the beginning and at the end, and reducing in place needs no special case.
//
// L ranks, N bytes each. A rank reads (L-1)/L N from others and writes as much into them, and adds N/L: for two ranks
// three passes over N/2, where slots take four.
#include <algorithm>

#include "shm/cma_step.h"
#include "shm/collectives.h"
#include "shm/tuned.h"

namespace ddl {

Status CmaAllReduce(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction,
                    uint64_t chunk_bytes) {
  const int me = pipeline.rank();
  const int size = pipeline.size();
  const uint64_t chunk = chunk_bytes / in.element_bytes();
  bool fit = false;
  DDL_RETURN_IF_ERROR(CmaStep::Run(pipeline, in, out, &fit, [&](CmaStep& step) -> Status {
    // This rank's own shard comes first, because it is warm in its caches. Then come chunks that other ranks have not
    // claimed yet, because their cores are slower or busy. Which rank reduces a chunk does not change its sum.
    for (int i = 0; i < size; ++i) {
      const int owner = (me + i) % size;
      const Range shard = ShardOf(owner, size, in.count(), in.element_bytes());
      for (;;) {
        const uint64_t at = shard.begin + pipeline.Claim(owner) * chunk;
        if (at >= shard.end) break;
        const uint64_t n = std::min(chunk, shard.end - at);
        DDL_RETURN_IF_ERROR(step.Check());
        DDL_RETURN_IF_ERROR(step.Reduce(in, 0, out, at, n, reduction));
        for (int k = 1; k < size; ++k) DDL_RETURN_IF_ERROR(step.Write((me + k) % size, at, n));
      }
    }
    return {};
  }));
  if (fit) return {};
  // Some rank's buffers are inaccessible. All ranks have seen that, so all of them use the slots instead.
  return SlotAllReduce(pipeline, in, out, reduction, SlotScheme(pipeline, DDL_ALL_REDUCE, in.bytes()));
}

}  // namespace ddl
