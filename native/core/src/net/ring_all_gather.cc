// The all-gather of a ring, for arrays of any length: each step's chunks travel in segments.
#include "net/ring.h"

namespace ddl {

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
