// HierarchicalCollectives: the collectives of a whole communicator, seen as a box: the ranks of a group share memory
// (the fastest dimension), the groups talk over the transport along one or more outer dimensions, such as the hosts of
// a rack and the racks (multi-dimensional ring, arXiv 1708.02188). Equal counts, dtypes and ops on all ranks.
//
// N: bytes of one rank's data, L: ranks in a group, G: groups. All-reduce: the group reduces N into L shards, each rank
// all-reduces its shard with the ranks of its place in the other groups (net/outer_all_reduce.h), the group gathers the
// shards. A rank sends 2 (G-1)/G N/L bytes, hence a group 2 (G-1)/G N, which is the minimum for any algorithm. In
// groups of unequal size only the first M ranks of each hold shards, M being the size of the smallest: 2 (G-1)/G N per
// group all the same. A reduce-scatter and an all-gather send half of that each, a group (G-1)/G N; in groups of
// unequal size a reduce-scatter is an all-reduce of which a rank keeps its part, and an all-gather one ring of all
// ranks.
#ifndef KERAS_DDL_CORE_HIERARCHY_HIERARCHICAL_COLLECTIVES_H_
#define KERAS_DDL_CORE_HIERARCHY_HIERARCHICAL_COLLECTIVES_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/outer_all_reduce.h"
#include "net/ring.h"
#include "shm/collectives.h"
#include "shm/group_memory.h"
#include "shm/tuned.h"

namespace ddl {

// What travels between groups is rounded to 16 bits. `errors` (or null): what this rank's rounding took away, kept for
// the next sum of the same elements, which it is added to (error feedback: Seide et al., 2014; Karimireddy et al.,
// 2019). Resized as this rank needs it, new entries 0: N/L elements, on a rank that holds no shard none. Read only
// across groups.
struct Compressed {
  ddl_compression to = DDL_COMPRESSION_NONE;
  std::vector<float>* errors = nullptr;
};

class HierarchicalCollectives {
 public:
  // `group[r]`: leader of rank r's group. `outer`: sizes of the outer dimensions, fastest first, filled with the groups
  // in the order of their leaders; their product is the number of groups. Empty: one dimension.
  HierarchicalCollectives(const ddl_transport& transport, GroupMemory& memory, Waiter& waiter,
                          const std::vector<int>& group, const std::vector<int>& outer = {});

  // `agreed`: see ShmAllReduce; only where there is one group. `compressed`: sums and means of float32.
  Status AllReduce(const View& in, const View& out, ddl_dtype dtype, ddl_op op,
                   const std::optional<Scheme>& agreed = {}, const Compressed& compressed = {});
  // The scheme that this rank proposes to its group for an all-reduce of `bytes`.
  Scheme Propose(uint64_t bytes) { return ProposeScheme(pipeline_, DDL_ALL_REDUCE, bytes); }
  // halves.cc. `ranges[r]`: elements of the input that rank r receives, reduced.
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
  // blocks.cc. leave(b, block): shared memory prepares block b, and it is started. come(b, block): it is done between
  // groups, and shared memory spreads it. `block` is null on a rank that holds no shard.
  using BlockStep = std::function<Status(uint64_t b, OuterAllReduce* block)>;
  Status RunBlocks(uint64_t num_blocks, const BlockStep& leave, const BlockStep& come);
  Status ProgressBlocks(bool* moved);
  // all_reduce.cc
  Status AllReduceAcross(const View& in, const View& out, const Stages& stages, const Compressed& compressed);
  std::vector<View> Shards(const View& whole, uint64_t offset, uint64_t count) const;
  std::vector<uint64_t> EvenParts(uint64_t count) const;
  // halves.cc
  uint64_t PieceLength(size_t element_bytes) const;
  std::vector<View> PiecesByLocalRank(const View& whole, const std::vector<Range>& ranges, uint64_t b,
                                      uint64_t length) const;
  std::vector<uint64_t> PartsOf(const std::vector<Range>& ranges, uint64_t b, uint64_t length) const;

  // One rank's shard of a block; bounds its memory: kBlocks blocks, each with room for two messages beside.
  static constexpr uint64_t kLargestShardBytes = 8 * 1024 * 1024;
  // Blocks that are in flight between groups at the same time. Enough to keep the links busy while a
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
  std::vector<size_t> group_of_part_;                    // the group that each part of a block belongs to
  Ring flat_;                                            // all ranks
  WireMemory scratch_;
  WireMemory adaptive_memory_;  // no message is under way in it
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_HIERARCHY_HIERARCHICAL_COLLECTIVES_H_
