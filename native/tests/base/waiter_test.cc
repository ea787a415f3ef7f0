// How often a waiting thread checks the other ranks, and shows them that it is alive.
#include "base/waiter.h"

#include <gtest/gtest.h>

#include <string>

namespace ddl_test {
namespace {

struct Looks {
  int looks = 0;
  ddl::Status health;
  ddl::Waiter waiter{[this] {
                       ++looks;
                       return health;
                     },
                     0, 1};

  // One wait that ends after `times` checks, and 0.1 ms of work.
  ddl::Status Wait(int times) {
    for (const double start = ddl::Now(); ddl::Now() - start < 1e-4;) ddl::CpuRelax();
    int looked = 0;
    return waiter.Until([&] { return ++looked >= times; }, [] { return std::string("a rank"); });
  }
  void WaitsFor(double seconds, int times) {
    for (const double start = ddl::Now(); ddl::Now() - start < seconds;) ASSERT_TRUE(Wait(times).ok());
  }
};

// The slowest rank of a long collective never waits long.
TEST(WaiterTest, ChecksSometimesDuringWaitsThatEndAtOnce) {
  Looks row;
  row.WaitsFor(0.65, 1);
  EXPECT_GE(row.looks, 3);
  EXPECT_LE(row.looks, 8);
}

TEST(WaiterTest, ChecksSometimesDuringShortWaits) {
  Looks row;
  row.WaitsFor(0.65, row.waiter.spins() + 2);
  EXPECT_GE(row.looks, 3);
}

TEST(WaiterTest, AFailedCheckEndsTheWait) {
  Looks row;
  row.health = {DDL_ABORTED, "rank 3 died"};
  EXPECT_EQ(row.Wait(row.waiter.spins() + 2).message(), "rank 3 died");
  Looks at_once;
  at_once.health = row.health;
  ddl::Status status;
  for (int i = 0; status.ok() && i < 1000; ++i) status = at_once.Wait(1);
  EXPECT_EQ(status.message(), "rank 3 died");
}

}  // namespace
}  // namespace ddl_test
