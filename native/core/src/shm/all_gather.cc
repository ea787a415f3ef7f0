// All-gather inside a group: each rank fills its slot, all others copy it out.
#include <algorithm>

#include "shm/collectives.h"

namespace ddl {

Status ShmAllGather(ShmPipeline& pipeline, const View& in, const std::vector<View>& outs) {
  const int me = pipeline.rank();
  if (pipeline.size() == 1) {
    CopyView(in, outs[0], ShmPipeline::ResultStore(in.bytes()));
    return {};
  }
  const size_t bytes = in.element_bytes();
  const uint64_t chunk = pipeline.slot_bytes() / bytes;
  uint64_t longest = 0;
  uint64_t total = 0;
  for (const View& out : outs) {
    longest = std::max(longest, out.count());
    total += out.bytes();
  }
  const uint64_t steps = (longest + chunk - 1) / chunk;
  const uint64_t first = pipeline.Reserve(steps);
  const Store slot_store = ShmPipeline::SlotStore(in.bytes());
  const Store result_store = ShmPipeline::ResultStore(total);

  const auto elements = [&](uint64_t count, uint64_t k) {
    return k * chunk >= count ? 0 : std::min(chunk, count - k * chunk);
  };
  for (uint64_t k = 0; k <= steps; ++k) {
    if (k < steps) {
      DDL_RETURN_IF_ERROR(pipeline.WaitFree(first + k));
      char* slot = pipeline.slot(me, first + k);
      in.ForEach(k * chunk, elements(in.count(), k), [&](const char* data, uint64_t from, uint64_t n) {
        Copy(slot + from * bytes, data, n * bytes, slot_store);
      });
      pipeline.MarkReady(first + k);
    }
    if (k == 0) continue;
    for (int i = 1; i < pipeline.size(); ++i) {
      const int j = (me + i) % pipeline.size();
      const View& out = outs[static_cast<size_t>(j)];
      DDL_RETURN_IF_ERROR(pipeline.WaitReadyOf(j, first + k - 1));
      const char* slot = pipeline.slot(j, first + k - 1);
      out.ForEach((k - 1) * chunk, elements(out.count(), k - 1),
                  [&](char* to, uint64_t from, uint64_t n) { Copy(to, slot + from * bytes, n * bytes, result_store); });
    }
    pipeline.MarkDone(first + k - 1);
  }
  CopyView(in, outs[static_cast<size_t>(me)], result_store);
  return {};
}

}  // namespace ddl
