// HierarchicalCollectives: the collectives of a whole communicator, seen as a box: the ranks of a group share memory
// (the fastest dimension), the groups talk over the transport along one or more outer dimensions, such as the hosts of
// a rack and the racks (multi-dimensional ring, arXiv 1708.02188). Equal counts, dtypes and ops on all ranks.
//
// N: bytes of one rank's data, L: ranks in a group, G: groups. All-reduce: the group reduces N into L shards, each rank
// all-reduces its shard with the ranks of its place in the other groups (net/outer_all_reduce.h), the group gathers the
// shards. A rank sends 2 (G-1)/G N/L bytes, hence a group 2 (G-1)/G N, which is the minimum for any algorithm. In
// groups of unequal size only the first M ranks of each hold shards, M being the size of the smallest: 2 (G-1)/G N per
// group all the same.
#ifndef KERAS_DDL_CORE_HIERARCHY_HIERARCHICAL_COLLECTIVES_H_
#define KERAS_DDL_CORE_HIERARCHY_HIERARCHICAL_COLLECTIVES_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/outer_all_reduce.h"
#include "net/ring.h"
#include "shm/collectives.h"
#include "shm/group_memory.h"

namespace ddl {

class HierarchicalCollectives {
 public:
  // `group[r]`: leader of rank r's group. `outer`: sizes of the outer dimensions, fastest first, filled with the groups
  // in the order of their leaders; their product is the number of groups. Empty: one dimension.
  HierarchicalCollectives(const ddl_transport& transport, GroupMemory& memory, Waiter& waiter,
                          const std::vector<int>& group, const std::vector<int>& outer = {});

  // `agreed`: see ShmAllReduce; only where there is one group.
  Status AllReduce(const View& in, const View& out, ddl_dtype dtype, ddl_op op,
                   const std::optional<Scheme>& agreed = {});
  // The scheme that this rank proposes to its group for an all-reduce of `bytes`.
  Scheme Propose(uint64_t bytes) { return ProposeScheme(pipeline_, bytes); }
  // `ranges[r]`: elements of the input that rank r receives, reduced.
  Status ReduceScatter(const View& in, char* out, const std::vector<Range>& ranges, ddl_dtype dtype, ddl_op op);
  // `ranges[r]`: elements of `out` that rank r gives.
  Status AllGather(const View& in, char* out, const std::vector<Range>& ranges, size_t element_bytes);
  // all_to_all.cc. `sends[r]`: the bytes of `in` for rank r; `receives[r]`: where in `out` those of rank r go, as many
  // as it sends. `in` and `out` do not overlap. Each byte moves once: between groups straight to its receiver.
  Status AllToAll(const char* in, const std::vector<Range>& sends, char* out, const std::vector<Range>& receives);
  Status Broadcast(int root, const View& in, const View& out);
  // adaptive_sum.cc. DDL_ADASUM of floats: consecutive `tensors` of so many elements, each by itself. Ranks are
  // combined in pairs, 0 with 1, 2 with 3 and so on, then their results; one without a neighbour goes on as it is. `in`
  // and `out` are equal piece by piece or do not overlap.
  Status AdaptiveSum(const View& in, const View& out, const std::vector<uint64_t>& tensors, ddl_dtype dtype);

  // "4 groups (2 each rank(s) in shared memory) joined by the transport as 2x2".
  std::string Describe() const;

 private:
  bool one_group() const { return groups_.size() == 1; }
  // A reduction across several groups: inside each, between them, and what is left to do to the result (a mean).
  struct Stages {
    Reduction inner;
    Reduction outer;
    Reduction last;
    bool has_last;
  };
  Stages StagesOf(ddl_dtype dtype, ddl_op op) const;
  // adaptive_sum.cc
  bool TreeFollowsBox() const;
  Status AdaptiveSumOfBox(const View& in, const View& out, const std::vector<uint64_t>& tensors, ddl_dtype dtype);
  Status AdaptiveSumOfAll(const View& in, const View& out, const std::vector<uint64_t>& tensors, ddl_dtype dtype);
  // all_reduce.cc
  Status AllReduceAcross(const View& in, const View& out, const Stages& stages, ddl_dtype dtype);
  std::vector<View> Shards(const View& whole, uint64_t offset, uint64_t count) const;
  Status ProgressBlocks(bool* moved);

  // Blocks of an all-reduce that are in flight between groups at the same time. Enough to keep the links busy while a
  // block is in shared memory and while others wait for their ranks to get a core.
  static constexpr int kBlocks = 4;

  const ddl_transport& transport_;
  Waiter& waiter_;
  ShmPipeline pipeline_;
  std::vector<std::vector<int>> groups_;  // ranks of each group, ascending; groups by leader
  int group_ = 0;                         // this rank's
  bool even_ = true;
  std::vector<int> outer_;
  size_t num_shards_;                                    // per group: ranks of it that talk to other groups
  std::vector<std::unique_ptr<OuterAllReduce>> blocks_;  // under way in turn; empty on a rank that holds no shard
  Ring cross_;  // even: ranks of equal local rank; uneven: the leaders (meaningful on leaders only)
  Ring flat_;   // all ranks
  WireMemory scratch_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_HIERARCHY_HIERARCHICAL_COLLECTIVES_H_
