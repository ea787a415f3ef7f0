// The layouts of ranks on which collectives are tested.
#ifndef KERAS_DDL_TESTS_TOPOLOGIES_H_
#define KERAS_DDL_TESTS_TOPOLOGIES_H_

#include <string>
#include <vector>

namespace ddl_test {

struct Topology {
  const char* name;
  std::vector<int> group;       // by rank: the lowest rank that shares memory with it
  std::vector<int> outer = {};  // the box of the groups, fastest dimension first; empty: one dimension
  int size() const { return static_cast<int>(group.size()); }
};

// All of them without a sanitizer, otherwise one of each kind: under the thread sanitizer, those that let threads meet
// in different ways; under the address sanitizer, those that share out memory in different ways, too.
inline const std::vector<Topology>& Topologies() {
  static const std::vector<Topology> all = {
      {"1", {0}},
      {"2_together", {0, 0}},
      {"3_together", {0, 0, 0}},
      {"3_apart", {0, 1, 2}},
      {"4_as_2x2_alternating", {0, 1, 0, 1}},
      {"5_as_3_2", {0, 0, 0, 3, 3}},
      {"6_as_1x3x2", {0, 1, 2, 3, 4, 5}, {3, 2}},
#ifndef __SANITIZE_THREAD__
      {"2_apart", {0, 1}},
      {"4_together", {0, 0, 0, 0}},
      {"6_as_3_2_1", {0, 0, 0, 3, 3, 5}},
      {"6_as_2_1_2_1_in_racks", {0, 0, 2, 3, 3, 5}, {2, 2}},
      {"8_as_2x2x2", {0, 0, 2, 2, 4, 4, 6, 6}, {2, 2}},
#ifndef __SANITIZE_ADDRESS__
      {"4_apart", {0, 1, 2, 3}},
      {"4_as_2x2", {0, 0, 2, 2}},
      {"8_together", {0, 0, 0, 0, 0, 0, 0, 0}},
      {"8_apart", {0, 1, 2, 3, 4, 5, 6, 7}},
      {"8_as_2x4", {0, 0, 0, 0, 4, 4, 4, 4}},
      {"8_as_1x2x2x2", {0, 1, 2, 3, 4, 5, 6, 7}, {2, 2, 2}},
#endif
#endif
  };
  return all;
}

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_TOPOLOGIES_H_
