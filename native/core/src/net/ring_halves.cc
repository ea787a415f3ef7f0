// The two halves of a ring all-reduce, for arrays of any length: each step's chunks travel in segments. The order in
// which a chunk is summed is fixed by its position in the ring.
#include "net/ring.h"

namespace ddl {
Status Ring::ReduceScatter(char* data, const std::vector<Range>& chunks, const Reduction& reduction) {
  const size_t bytes = DtypeSize(reduction.dtype);
  for (int step = 0; step < size() - 1; ++step) {
    const auto [send, receive] = ReduceScatterStep(position_, size(), step);
    const Range& out = chunks[send];
    const Range& in = chunks[receive];
    char* target = data + in.begin * bytes;
    DDL_RETURN_IF_ERROR(Exchange(1, data + out.begin * bytes, out.size() * bytes, in.size() * bytes,
                                 [&](const char* arrived, uint64_t offset, uint64_t n) {
                                   const void* sources[] = {arrived, target + offset};
                                   Reduce(reduction.dtype, reduction.op, sources, 2, target + offset, n / bytes, 1.0,
                                          Store::kCached);
                                 }));
  }
  return {};
}

Status Ring::AllGather(char* data, const std::vector<Range>& chunks, size_t element_bytes) {
  for (int step = 0; step < size() - 1; ++step) {
    const auto [send, receive] = AllGatherStep(position_, size(), step);
    const Range& out = chunks[send];
    const Range& in = chunks[receive];
    char* const target = data + in.begin * element_bytes;
    DDL_RETURN_IF_ERROR(Exchange(
        1, data + out.begin * element_bytes, out.size() * element_bytes, in.size() * element_bytes,
        [&](const char* arrived, uint64_t offset, uint64_t n) { Copy(target + offset, arrived, n, Store::kCached); }));
  }
  return {};
}

}  // namespace ddl
