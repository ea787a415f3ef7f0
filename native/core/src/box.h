// Box: the collectives of a whole communicator, seen as a box of two dimensions: the ranks of a group share memory, the
// groups talk over the transport (multi-dimensional ring, arXiv 1708.02188). Equal counts, dtypes and ops on all ranks.
//
// N: bytes of one rank's data, L: ranks in a group, G: groups. All-reduce of equal groups sends 2 (G-1)/G N/L bytes per
// rank, hence 2 (G-1)/G N per group: what a flat ring of G ranks would. Groups of unequal size let one rank of each
// group talk for it.
#ifndef KERAS_DDL_CORE_BOX_H_
#define KERAS_DDL_CORE_BOX_H_

#include <string>
#include <vector>

#include "group_memory.h"
#include "ring.h"
#include "shm_collectives.h"

namespace ddl {

class Box {
 public:
  // `group[r]`: leader of rank r's group.
  Box(const ddl_transport& transport, GroupMemory& memory, Waiter& waiter, const std::vector<int>& group);

  Status AllReduce(const View& in, const View& out, ddl_dtype dtype, ddl_op op);
  // `ranges[r]`: elements of the input that rank r receives, reduced.
  Status ReduceScatter(const View& in, char* out, const std::vector<Range>& ranges, ddl_dtype dtype, ddl_op op);
  // `ranges[r]`: elements of `out` that rank r gives.
  Status AllGather(const View& in, char* out, const std::vector<Range>& ranges, size_t element_bytes);
  Status Broadcast(int root, const View& in, const View& out);

  // "2 groups of 2 ranks".
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
  Status AllReduceEven(const View& in, const View& out, const Stages& stages);
  Status AllReduceUneven(const View& in, const View& out, const Stages& stages);
  char* Scratch(uint64_t bytes);

  const ddl_transport& transport_;
  Waiter& waiter_;
  ShmPipeline pipeline_;
  std::vector<std::vector<int>> groups_;  // ranks of each group, ascending; groups by leader
  int group_ = 0;                         // this rank's
  bool even_ = true;
  Ring cross_;  // even: ranks of equal local rank; uneven: the leaders (meaningful on leaders only)
  Ring flat_;   // all ranks
  std::vector<char> scratch_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BOX_H_
