// All-gather inside a group: each rank fills its slot, all others copy it out.
#include <algorithm>

#include "shm/collectives.h"
#include "shm/tuned.h"

namespace ddl {

Status SlotAllGather(ShmPipeline& pipeline, const View& in, const std::vector<View>& outs, const Scheme& scheme) {
  const int me = pipeline.rank();
  const size_t bytes = in.element_bytes();
  const uint64_t chunk = scheme.chunk_bytes / bytes;
  uint64_t longest = 0;
  for (const View& out : outs) longest = std::max(longest, out.count());
  const uint64_t steps = (longest + chunk - 1) / chunk;
  const uint64_t first = pipeline.Reserve(steps);

  const auto elements = [&](uint64_t count, uint64_t k) {
    return k * chunk >= count ? 0 : std::min(chunk, count - k * chunk);
  };
  for (uint64_t k = 0; k <= steps; ++k) {
    if (k < steps) {
      DDL_RETURN_IF_ERROR(pipeline.WaitFree(first + k));
      char* slot = pipeline.slot(me, first + k);
      in.ForEach(k * chunk, elements(in.count(), k), [&](const char* data, uint64_t from, uint64_t n) {
        Copy(slot + from * bytes, data, n * bytes, scheme.slot_store);
      });
      pipeline.MarkReady(first + k);
    }
    if (k == 0) continue;
    for (int i = 1; i < pipeline.size(); ++i) {
      const int j = (me + i) % pipeline.size();
      const View& out = outs[static_cast<size_t>(j)];
      DDL_RETURN_IF_ERROR(pipeline.WaitReadyOf(j, first + k - 1));
      const char* slot = pipeline.slot(j, first + k - 1);
      out.ForEach((k - 1) * chunk, elements(out.count(), k - 1), [&](char* to, uint64_t from, uint64_t n) {
        Copy(to, slot + from * bytes, n * bytes, scheme.result_store);
      });
    }
    pipeline.MarkDone(first + k - 1);
  }
  CopyView(in, outs[static_cast<size_t>(me)], scheme.result_store);
  return {};
}

Status ShmAllGather(ShmPipeline& pipeline, const View& in, const std::vector<View>& outs) {
  uint64_t total = 0;
  for (const View& out : outs) total += out.bytes();
  if (pipeline.size() == 1) {
    CopyView(in, outs[0], ShmPipeline::ResultStore(total));
    return {};
  }
  return RunTuned(pipeline, DDL_ALL_GATHER, total, {}, [&](const Scheme& scheme) {
    return scheme.algorithm == Algorithm::kCma ? CmaAllGather(pipeline, in, outs, scheme.chunk_bytes)
                                               : SlotAllGather(pipeline, in, outs, scheme);
  });
}

}  // namespace ddl
