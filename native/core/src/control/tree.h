// ControlTree: the way of control messages between the ranks and the coordinator. Where few ranks are on other hosts,
// each of them talks to rank 0 itself. Where they are many, the first rank of each group gathers what its group
// announces (relay.h) and passes decisions on, and so do, above the groups, as few levels of these first ranks as the
// fan-in allows. Pure arithmetic, the same on all ranks.
#ifndef KERAS_DDL_CORE_CONTROL_TREE_H_
#define KERAS_DDL_CORE_CONTROL_TREE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ddl {

class ControlTree {
 public:
  struct Child {
    int rank;
    std::vector<int> ranks;  // reached through it, ascending; itself included
  };
  // Of 4,096 ranks on 1,024 hosts, rank 0 then talks to 32 others.
  static constexpr uint32_t kDefaultFanIn = 64;

  // The place of `rank`. `group[r]`: leader (lowest rank) of rank r's group. `fan_in`: the most ranks of other groups
  // that may talk to one rank; 0: kDefaultFanIn.
  ControlTree(const std::vector<int>& group, int rank, uint32_t fan_in);

  int rank() const { return rank_; }
  // Whom this rank talks to instead of rank 0; of rank 0: -1.
  int parent() const { return parent_; }
  const std::vector<Child>& children() const { return children_; }
  // Whether this rank, which is not rank 0, passes on messages of others.
  bool relays() const { return rank_ != 0 && !children_.empty(); }
  // All ranks that are reached through this one, ascending; itself included.
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  const int rank_;
  int parent_ = -1;
  std::vector<Child> children_;
  std::vector<int> ranks_;
};

// A message for a child, which is to reach some of the ranks behind it.
struct Routed {
  int child;
  std::string bytes;
};
// What a rank at this place of the tree sends so that `message` reaches `ranks`, all of which are behind it.
std::vector<Routed> Route(const ControlTree& tree, const std::vector<int>& ranks, const std::string& message);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_TREE_H_
