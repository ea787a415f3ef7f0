// HierarchicalCollectives: the collectives of a whole communicator, seen as a box. The ranks of a group share memory
// (the fastest dimension), and the groups communicate over the transport along one or more outer dimensions, such as
// the hosts of a rack and the racks (multi-dimensional ring, arXiv 1708.02188). Counts, dtypes and ops are equal on all
// ranks.
//
// N: bytes of one rank's data, L: ranks in a group, G: groups. All-reduce: the group reduces N into L shards, each rank
// all-reduces its shard with the ranks at the same place in the other groups (net/outer_all_reduce.h), and the group
// gathers the shards. A rank sends 2 (G-1)/G N/L bytes, so a group sends 2 (G-1)/G N, the minimum for any algorithm. If
// groups have different sizes and the smallest has M ranks, only the first M ranks of each group hold shards; a group
// still sends 2 (G-1)/G N. A reduce-scatter and an all-gather each send half of that, (G-1)/G N per group. If groups
// have different sizes, a reduce-scatter is an all-reduce from which each rank keeps its part, and an all-gather is one
// ring of all ranks.
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

// Rounds data to 16 bits while it travels between groups. `errors` (or null): the errors of this rank's rounding, which
// are added to the next sum of the same elements (error feedback: Seide et al., 2014; Karimireddy et al., 2019). It is
// resized to this rank's needs, N/L elements or none on a rank without a shard; new entries are 0. It is only read if
// there are several groups.
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

  // `agreed`: see ShmAllReduce; only with one group. `compressed`: for sums and means of float32.
  Status AllReduce(const View& in, const View& out, ddl_dtype dtype, ddl_op op,
                   const std::optional<Scheme>& agreed = {}, const Compressed& compressed = {});
  // all_reduce.cc. All-reduces `data` in place among the ranks with this rank's local rank, one in each group. Groups
  // have equal sizes, and there are several.
  Status AllReduceBetween(const View& data, ddl_dtype dtype, ddl_op op);
  // The scheme that this rank proposes to its group for an all-reduce of `bytes`.
  Scheme Propose(uint64_t bytes) { return ProposeScheme(pipeline_, DDL_ALL_REDUCE, bytes); }
  // halves.cc. `ranges[r]`: the elements of the reduced input that rank r receives.
  Status ReduceScatter(const View& in, char* out, const std::vector<Range>& ranges, ddl_dtype dtype, ddl_op op);
  // `ranges[r]`: the elements of `out` that come from rank r.
  Status AllGather(const View& in, char* out, const std::vector<Range>& ranges, size_t element_bytes);
  // all_to_all.cc. `sends[r]`: the bytes of `in` for rank r; `receives[r]`: the bytes of `out` from rank r, as many as
  // it sends. `in` and `out` do not overlap. Each byte moves once; between groups, directly to its receiver.
  Status AllToAll(const char* in, const std::vector<Range>& sends, char* out, const std::vector<Range>& receives);
  Status Broadcast(int root, const View& in, const View& out);
  // adaptive_sum.cc. DDL_ADASUM of floats. `tensors`: the elements of consecutive tensors, which are summed separately.
  // Ranks are combined in pairs, 0 with 1, 2 with 3 and so on, then their results in the same way. A rank without a
  // neighbour passes to the next level. `in` and `out` are equal piece by piece or do not overlap.
  Status AdaptiveSum(const View& in, const View& out, const std::vector<uint64_t>& tensors, ddl_dtype dtype);

  // "4 groups (2 each rank(s) in shared memory) joined by the transport as 2x2".
  std::string Describe() const;

 private:
  bool one_group() const { return groups_.size() == 1; }
  // A reduction across several groups: inside each group, between them, and at last on the result (for a mean).
  struct Stages {
    Reduction inner;
    Reduction outer;
    Reduction last;
    bool has_last;
  };
  static Stages StagesOf(ddl_dtype dtype, ddl_op op, int ranks);
  // adaptive_sum.cc
  bool TreeFollowsBox() const;
  Status AdaptiveSumOfBox(const View& in, const View& out, const std::vector<uint64_t>& tensors, ddl_dtype dtype);
  Status AdaptiveSumOfAll(const View& in, const View& out, const std::vector<uint64_t>& tensors, ddl_dtype dtype);
  // blocks.cc. leave(b, block): prepares block b in shared memory and starts it. come(b, block): after the exchange
  // between groups, spreads block b in shared memory. `block` is null on a rank that holds no shard.
  using BlockStep = std::function<Status(uint64_t b, OuterAllReduce* block)>;
  Status RunBlocks(uint64_t num_blocks, const BlockStep& leave, const BlockStep& come);
  Status ProgressBlocks(bool* moved);
  // all_reduce.cc
  Status AllReduceAcross(const View& in, const View& out, const Stages& stages, const Compressed& compressed);
  std::vector<View> Shards(const View& whole, uint64_t offset, uint64_t count) const;
  uint64_t ShardLength(size_t element_bytes, size_t wire_bytes) const;
  std::vector<uint64_t> EvenParts(uint64_t count) const;
  // halves.cc
  uint64_t PieceLength(size_t element_bytes) const;
  std::vector<View> PiecesByLocalRank(const View& whole, const std::vector<Range>& ranges, uint64_t b,
                                      uint64_t length) const;
  std::vector<uint64_t> PartsOf(const std::vector<Range>& ranges, uint64_t b, uint64_t length) const;

  // Limit on a rank's shard of a block, and so on its memory: kBlocks blocks, each with room for two more messages.
  static constexpr uint64_t kLargestShardBytes = 8 * 1024 * 1024;
  // Blocks in flight between groups at the same time. Enough to keep the links busy while one block is in shared memory
  // and others wait for their ranks to get a core.
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
