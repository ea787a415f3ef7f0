// Broadcast inside a group: the root fills its slot, all others copy it out.
#include <algorithm>

#include "shm/collectives.h"

namespace ddl {

Status ShmBroadcast(ShmPipeline& pipeline, int root, const View& in, const View& out) {
  const bool is_root = pipeline.rank() == root;
  const size_t bytes = out.element_bytes();
  const uint64_t chunk = pipeline.slot_bytes() / bytes;
  const uint64_t steps = (out.count() + chunk - 1) / chunk;
  const uint64_t first = pipeline.Reserve(pipeline.size() > 1 ? steps : 0);
  const Store slot_store = ShmPipeline::SlotStore(out.bytes());
  const Store result_store = ShmPipeline::ResultStore(out.bytes());

  for (uint64_t k = 0; k < steps && pipeline.size() > 1; ++k) {
    const uint64_t n = std::min(chunk, out.count() - k * chunk);
    if (is_root) {
      DDL_RETURN_IF_ERROR(pipeline.WaitFree(first + k));
      in.ForEach(k * chunk, n, [&](const char* data, uint64_t from, uint64_t m) {
        Copy(pipeline.slot(root, first + k) + from * bytes, data, m * bytes, slot_store);
      });
      pipeline.MarkReady(first + k);
    } else {
      pipeline.MarkReady(first + k);
      DDL_RETURN_IF_ERROR(pipeline.WaitReadyOf(root, first + k));
      out.ForEach(k * chunk, n, [&](char* to, uint64_t from, uint64_t m) {
        Copy(to, pipeline.slot(root, first + k) + from * bytes, m * bytes, result_store);
      });
    }
    pipeline.MarkDone(first + k);
  }
  if (is_root) CopyView(in, out, result_store);
  return {};
}

}  // namespace ddl
