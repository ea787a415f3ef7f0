// Reduce-scatter inside a group: a slot is cut into one part per rank; each rank reads its part of every slot.
#include <algorithm>

#include "shm/collectives.h"
#include "shm/tuned.h"

namespace ddl {

Status SlotReduceScatter(ShmPipeline& pipeline, const std::vector<View>& parts, const View& out,
                         const Reduction& reduction, const Scheme& scheme) {
  const int me = pipeline.rank();
  const auto size = static_cast<size_t>(pipeline.size());
  const size_t bytes = out.element_bytes();
  const uint64_t chunk = scheme.chunk_bytes / bytes / size / (64 / bytes) * (64 / bytes);
  uint64_t longest = 0;
  for (const View& part : parts) longest = std::max(longest, part.count());
  const uint64_t steps = (longest + chunk - 1) / chunk;
  const uint64_t first = pipeline.Reserve(steps);
  std::vector<const void*> sources(size);

  const auto elements = [&](const View& part, uint64_t k) {
    return k * chunk >= part.count() ? 0 : std::min(chunk, part.count() - k * chunk);
  };
  for (uint64_t k = 0; k <= steps; ++k) {
    if (k < steps) {
      DDL_RETURN_IF_ERROR(pipeline.WaitFree(first + k));
      for (size_t j = 0; j < size; ++j) {
        if (static_cast<int>(j) == me) continue;
        char* slot = pipeline.slot(me, first + k) + j * chunk * bytes;
        parts[j].ForEach(k * chunk, elements(parts[j], k), [&](const char* data, uint64_t from, uint64_t n) {
          Copy(slot + from * bytes, data, n * bytes, scheme.slot_store);
        });
      }
      pipeline.MarkReady(first + k);
    }
    if (k == 0) continue;
    DDL_RETURN_IF_ERROR(pipeline.WaitReady(first + k - 1));
    const View& own = parts[static_cast<size_t>(me)];
    View::ForEachPair(
        own, out, (k - 1) * chunk, elements(own, k - 1), [&](char* in, char* to, uint64_t from, uint64_t n) {
          for (size_t j = 0; j < size; ++j) {
            sources[j] = static_cast<int>(j) == me ? in
                                                   : pipeline.slot(static_cast<int>(j), first + k - 1) +
                                                         (static_cast<uint64_t>(me) * chunk + from) * bytes;
          }
          Reduce(reduction.dtype, reduction.op, sources.data(), static_cast<int>(size), to, n, reduction.divisor,
                 scheme.result_store);
        });
    pipeline.MarkDone(first + k - 1);
  }
  return {};
}

Status ShmReduceScatter(ShmPipeline& pipeline, const std::vector<View>& parts, const View& out,
                        const Reduction& reduction) {
  if (pipeline.size() == 1) {
    ReduceAlone(parts[0], out, reduction);
    return {};
  }
  uint64_t total = 0;
  for (const View& part : parts) total += part.bytes();
  return RunTuned(pipeline, DDL_REDUCE_SCATTER, total, {}, [&](const Scheme& scheme) {
    return scheme.algorithm == Algorithm::kCma ? CmaReduceScatter(pipeline, parts, out, reduction, scheme.chunk_bytes)
                                               : SlotReduceScatter(pipeline, parts, out, reduction, scheme);
  });
}

}  // namespace ddl
