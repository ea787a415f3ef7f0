// All-to-all inside a group: each rank sends a stream of bytes through its slots, from which every other rank copies
// its part. The stream begins with a table of where the parts begin, so that ranks learn each other's lengths from it.
#include <algorithm>
#include <cstring>

#include "shm/collectives.h"

namespace ddl {
namespace {

// Where each local rank's part begins in the stream, then where the stream ends. It fits into a slot, which has a cache
// line for every rank.
using Table = std::vector<uint64_t>;

}  // namespace

Status ShmAllToAll(ShmPipeline& pipeline, const std::vector<View>& parts, const std::vector<View>& outs) {
  const auto me = static_cast<size_t>(pipeline.rank());
  const auto size = static_cast<size_t>(pipeline.size());
  uint64_t total = 0;
  for (const View& out : outs) total += out.bytes();
  const Store result_store = ShmPipeline::ResultStore(total);
  if (size == 1) {
    CopyView(parts[me], outs[me], result_store);
    return {};
  }
  Table table(size + 1);
  View stream(1);
  stream.Add(table.data(), table.size() * sizeof table[0]);
  // The next rank's part comes first, so that ranks copy from different slots at any time, and no rank waits until all
  // other ranks' parts have passed.
  for (size_t i = 1; i < size; ++i) {
    const View& part = parts[(me + i) % size];
    table[(me + i) % size] = stream.count();
    stream.Add(part, 0, part.count());
  }
  table[size] = stream.count();

  const uint64_t chunk = pipeline.slot_bytes();
  const Store slot_store = ShmPipeline::SlotStore(stream.count());
  const auto send = [&](uint64_t step, uint64_t k) -> Status {
    DDL_RETURN_IF_ERROR(pipeline.WaitFree(step));
    char* const slot = pipeline.slot(pipeline.rank(), step);
    const uint64_t begin = std::min(k * chunk, stream.count());
    stream.ForEach(begin, std::min(chunk, stream.count() - begin),
                   [&](const char* data, uint64_t from, uint64_t n) { Copy(slot + from, data, n, slot_store); });
    pipeline.MarkReady(step);
    return {};
  };

  const uint64_t first = pipeline.Reserve(1);
  DDL_RETURN_IF_ERROR(send(first, 0));
  DDL_RETURN_IF_ERROR(pipeline.WaitReady(first));
  std::vector<uint64_t> begins(size);  // of the parts for this rank
  uint64_t longest = 0;
  for (size_t j = 0; j < size; ++j) {
    Table theirs(size + 1);
    std::memcpy(theirs.data(), pipeline.slot(static_cast<int>(j), first), theirs.size() * sizeof theirs[0]);
    begins[j] = theirs[me];
    longest = std::max(longest, theirs[size]);
  }
  const uint64_t steps = (longest + chunk - 1) / chunk;
  pipeline.Reserve(steps - 1);

  for (uint64_t k = 0; k < steps; ++k) {
    if (k + 1 < steps) DDL_RETURN_IF_ERROR(send(first + k + 1, k + 1));
    for (size_t i = 1; i < size; ++i) {
      const size_t j = (me + size - i) % size;
      const uint64_t begin = std::max(k * chunk, begins[j]);
      const uint64_t end = std::min((k + 1) * chunk, begins[j] + outs[j].count());
      if (begin >= end) continue;
      DDL_RETURN_IF_ERROR(pipeline.WaitReadyOf(static_cast<int>(j), first + k));
      const char* const data = pipeline.slot(static_cast<int>(j), first + k) + (begin - k * chunk);
      outs[j].ForEach(begin - begins[j], end - begin,
                      [&](char* to, uint64_t from, uint64_t n) { Copy(to, data + from, n, result_store); });
    }
    pipeline.MarkDone(first + k);
  }
  CopyView(parts[me], outs[me], result_store);
  return {};
}

}  // namespace ddl
