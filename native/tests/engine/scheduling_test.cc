// The cores to which the communication threads of a host's ranks are bound.
#include "engine/scheduling.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>
#include <vector>

namespace ddl_test {
namespace {

using Cores = std::vector<int>;

TEST(CoresTest, AreDividedWithoutOverlap) {
  EXPECT_EQ(ddl::OwnCores({0, 1}, 0, 2), Cores({0}));
  EXPECT_EQ(ddl::OwnCores({0, 1}, 1, 2), Cores({1}));
  EXPECT_EQ(ddl::OwnCores({2, 3, 5, 7, 11}, 0, 2), Cores({2, 5, 11}));
  EXPECT_EQ(ddl::OwnCores({2, 3, 5, 7, 11}, 1, 2), Cores({3, 7}));
  EXPECT_EQ(ddl::OwnCores({0, 1, 2, 3}, 0, 1), Cores({0, 1, 2, 3}));
}

TEST(CoresTest, AreAllCoresWhenThereAreTooFew) {
  EXPECT_EQ(ddl::OwnCores({0, 1}, 2, 3), Cores({0, 1}));
  EXPECT_EQ(ddl::OwnCores({5}, 1, 2), Cores({5}));  // a rank already bound to one core
}

TEST(CoresTest, BindOnlyTheCallingThread) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  const int count = CPU_COUNT(&before);
  cpu_set_t seen[2];
  for (int sharer = 0; sharer < 2; ++sharer) {
    std::thread([&seen, sharer] {
      ddl::KeepToOwnCores(sharer, 2);
      sched_getaffinity(0, sizeof seen[sharer], &seen[sharer]);
    }).join();
  }
  cpu_set_t both;
  CPU_AND(&both, &seen[0], &seen[1]);
  EXPECT_EQ(CPU_COUNT(&both), count < 2 ? count : 0);
  CPU_OR(&both, &seen[0], &seen[1]);
  EXPECT_TRUE(CPU_EQUAL(&both, &before));
  cpu_set_t after;
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&after, &before));
}

}  // namespace
}  // namespace ddl_test
