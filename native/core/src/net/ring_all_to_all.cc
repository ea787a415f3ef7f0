// All-to-all by messages. In step s each position sends to the position s ahead and receives from the position s
// behind, so that no two positions send to the same one at the same time. Positions need not be in the same step:
// positions that are ahead wait for the others, and the last position finds its messages in flight or already there.
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
