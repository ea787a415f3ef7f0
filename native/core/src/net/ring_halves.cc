// The two halves of a ring all-reduce: in step s of the reduce-scatter position p sends chunk p - s - 1 and reduces
// chunk p - s - 2 as it arrives; after P - 1 steps it owns chunk p reduced over all, which in the all-gather travels
// once more around (Patarasuk & Yuan, 2009). The order of the sum of a chunk is fixed by its place in the ring.
#include "net/ring.h"

namespace ddl {
namespace {

size_t Wrap(int position, int size) { return static_cast<size_t>(((position % size) + size) % size); }

}  // namespace

Status Ring::ReduceScatter(char* data, const std::vector<Range>& chunks, const Reduction& reduction) {
  const size_t bytes = DtypeSize(reduction.dtype);
  for (int step = 0; step < size() - 1; ++step) {
    const Range& out = chunks[Wrap(position_ - step - 1, size())];
    const Range& in = chunks[Wrap(position_ - step - 2, size())];
    char* target = data + in.begin * bytes;
    DDL_RETURN_IF_ERROR(Exchange(data + out.begin * bytes, out.size() * bytes, in.size() * bytes,
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
    const Range& out = chunks[Wrap(position_ - step, size())];
    const Range& in = chunks[Wrap(position_ - step - 1, size())];
    char* const target = data + in.begin * element_bytes;
    DDL_RETURN_IF_ERROR(Exchange(
        data + out.begin * element_bytes, out.size() * element_bytes, in.size() * element_bytes,
        [&](const char* arrived, uint64_t offset, uint64_t n) { Copy(target + offset, arrived, n, Store::kCached); }));
  }
  return {};
}

}  // namespace ddl
