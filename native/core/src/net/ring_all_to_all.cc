// All-to-all by messages: in step s each position sends to the one s ahead and receives from the one s behind, so that
// no two send to one position at once. Positions need not be in the same step: one that is ahead waits for those
// behind, and the one furthest behind finds its messages in flight or already there.
#include "net/ring.h"

namespace ddl {

Status Ring::AllToAll(const char* in, const std::vector<Range>& sends, char* out, const std::vector<Range>& receives) {
  for (int step = 1; step < size(); ++step) {
    const Range& leaving = sends[Ahead(step)];
    const Range& coming = receives[Behind(step)];
    DDL_RETURN_IF_ERROR(Exchange(step, in + leaving.begin, leaving.size(), coming.size(),
                                 [&](const char* arrived, uint64_t offset, uint64_t n) {
                                   Copy(out + coming.begin + offset, arrived, n, Store::kCached);
                                 }));
  }
  return {};
}

}  // namespace ddl
