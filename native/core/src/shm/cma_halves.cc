// Reduce-scatter and all-gather by cross memory attach (cma_step.h): each rank reads the data that it needs directly
// from the other ranks' inputs. Ranks only read each other's memory, and only write their own results.
#include <algorithm>

#include "shm/cma_step.h"
#include "shm/collectives.h"
#include "shm/tuned.h"

namespace ddl {

Status CmaReduceScatter(ShmPipeline& pipeline, const std::vector<View>& parts, const View& out,
                        const Reduction& reduction, uint64_t chunk_bytes) {
  const size_t bytes = out.element_bytes();
  const uint64_t chunk = chunk_bytes / bytes;
  const auto me = static_cast<size_t>(pipeline.rank());
  View whole(bytes);
  uint64_t own_begin = 0;  // in `whole`, equal on all ranks
  for (size_t j = 0; j < parts.size(); ++j) {
    if (j == me) own_begin = whole.count();
    whole.Add(parts[j], 0, parts[j].count());
  }
  bool fit = false;
  DDL_RETURN_IF_ERROR(CmaStep::Run(pipeline, whole, whole, &fit, [&](CmaStep& step) -> Status {
    for (uint64_t at = 0; at < out.count(); at += chunk) {
      DDL_RETURN_IF_ERROR(step.Check());
      DDL_RETURN_IF_ERROR(step.Reduce(parts[me], own_begin, out, at, std::min(chunk, out.count() - at), reduction));
    }
    return {};
  }));
  if (fit) return {};
  return SlotReduceScatter(pipeline, parts, out, reduction, SlotScheme(pipeline, DDL_REDUCE_SCATTER, whole.bytes()));
}

Status CmaAllGather(ShmPipeline& pipeline, const View& in, const std::vector<View>& outs, uint64_t chunk_bytes) {
  const uint64_t chunk = chunk_bytes / in.element_bytes();
  const auto me = static_cast<size_t>(pipeline.rank());
  uint64_t total = 0;
  for (const View& out : outs) total += out.bytes();
  bool fit = false;
  DDL_RETURN_IF_ERROR(CmaStep::Run(pipeline, in, in, &fit, [&](CmaStep& step) -> Status {
    // The next rank's input comes first, so that the ranks do not all read from the same rank.
    for (size_t i = 1; i < outs.size(); ++i) {
      const size_t j = (me + i) % outs.size();
      for (uint64_t at = 0; at < outs[j].count(); at += chunk) {
        DDL_RETURN_IF_ERROR(step.Check());
        const uint64_t n = std::min(chunk, outs[j].count() - at);
        DDL_RETURN_IF_ERROR(step.Read(static_cast<int>(j), at, outs[j], at, n));
      }
    }
    CopyView(in, outs[me], ShmPipeline::ResultStore(total));
    return {};
  }));
  if (fit) return {};
  return SlotAllGather(pipeline, in, outs, SlotScheme(pipeline, DDL_ALL_GATHER, total));
}

}  // namespace ddl
