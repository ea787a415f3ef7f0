// All-to-all: in shared memory among the ranks of a group, and by direct messages between ranks of different groups,
// for any box of groups, because a byte would move more than once on a way through other ranks.
#include "hierarchy/hierarchical_collectives.h"

namespace ddl {

Status HierarchicalCollectives::AllToAll(const char* in, const std::vector<Range>& sends, char* out,
                                         const std::vector<Range>& receives) {
  const auto& members = groups_[static_cast<size_t>(group_)];
  if (!one_group()) {
    std::vector<Range> leaving = sends;
    std::vector<Range> coming = receives;
    for (const int rank : members) leaving[static_cast<size_t>(rank)] = coming[static_cast<size_t>(rank)] = {0, 0};
    DDL_RETURN_IF_ERROR(flat_.AllToAll(in, leaving, out, coming));
  }
  std::vector<View> parts;
  std::vector<View> results;
  for (const int member : members) {
    const auto rank = static_cast<size_t>(member);
    parts.emplace_back(1, in + sends[rank].begin, sends[rank].size());
    results.emplace_back(1, out + receives[rank].begin, receives[rank].size());
  }
  return ShmAllToAll(pipeline_, parts, results);
}

}  // namespace ddl
