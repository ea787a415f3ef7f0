// Ring all-reduce: in step s position p sends chunk p - s and reduces chunk p - s - 1 as it arrives; after P - 1 steps
// it owns chunk p + 1 reduced over all, which then travels once more around (Patarasuk & Yuan, 2009). The order of the
// sum of a chunk is fixed by its place in the ring, and every rank ends with the same copy: bitwise equal results.
#include "ring.h"

namespace ddl {
namespace {

size_t Wrap(int position, int size) { return static_cast<size_t>(((position % size) + size) % size); }

}  // namespace

Status Ring::ReduceScatter(char* data, const std::vector<Range>& chunks, const Reduction& reduction) {
  const size_t bytes = DtypeSize(reduction.dtype);
  for (int step = 0; step < size() - 1; ++step) {
    // Shifted by one against the classic numbering, so that position p ends up owning chunk p.
    const Range& out = chunks[Wrap(position_ - step - 1, size())];
    const Range& in = chunks[Wrap(position_ - step - 2, size())];
    char* target = data + in.begin * bytes;
    DDL_RETURN_IF_ERROR(Exchange(data + out.begin * bytes, out.size() * bytes, nullptr, in.size() * bytes,
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
    DDL_RETURN_IF_ERROR(Exchange(data + out.begin * element_bytes, out.size() * element_bytes,
                                 data + in.begin * element_bytes, in.size() * element_bytes, nullptr));
  }
  return {};
}

Status Ring::AllReduce(char* data, uint64_t count, const Reduction& reduction) {
  if (size() == 1) return {};
  const std::vector<Range> chunks = SplitEvenly(count, size());
  DDL_RETURN_IF_ERROR(ReduceScatter(data, chunks, reduction));
  return AllGather(data, chunks, DtypeSize(reduction.dtype));
}

}  // namespace ddl
