// The inline path alone, without a communication thread.
#include "engine/inline_path.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "engine/endpoints.h"

namespace ddl_test {
namespace {

constexpr uint32_t kLongPatienceUs = 20'000'000;

struct Sum {
  Sum(const char* name, size_t count) : data(count, 1), buffer{data.data(), data.data(), count, {}} {
    request.kind = DDL_ALL_REDUCE;
    request.num_buffers = 1;
    request.buffers = &buffer;
    request.name = name;
  }
  std::vector<float> data;
  ddl_buffer buffer;
  ddl_request request{};
};

TEST(InlinePathTest, RunsOnAllCallingThreads) {
  for (const int size : {1, 2, 4}) {
    RunEndpoints(AllTogether(size), [&](std::unique_ptr<ddl::Endpoint> endpoint, int) {
      ddl::InlinePath path(*endpoint);
      for (const size_t count : {0u, 1u, 5000u, 300'000u}) {
        Sum sum("sum", count);
        EXPECT_EQ(path.TryRun(sum.request, kLongPatienceUs), 1);
        EXPECT_EQ(sum.data, std::vector<float>(count, static_cast<float>(size)));
      }
      EXPECT_EQ(path.num_run(), 4u);
    });
  }
}

TEST(InlinePathTest, SendsSmallDataWithTheRecord) {
  const auto is_eager = [](size_t kilobytes, int size) {
    return ddl::IsEager(Sum("sum", kilobytes * 1024 / sizeof(float)).request, size);
  };
  for (const int size : {2, 3, 4, 8, 64}) EXPECT_TRUE(is_eager(16, size)) << size;
  EXPECT_TRUE(is_eager(24, 2));
  EXPECT_FALSE(is_eager(32, 2));  // from this size on, two ranks divide the work
  EXPECT_TRUE(is_eager(64, 4));
  EXPECT_FALSE(is_eager(64, 5));
  EXPECT_FALSE(is_eager(65, 3));
  Sum broadcast("broadcast", 16 * 1024);
  broadcast.request.kind = DDL_BROADCAST;
  EXPECT_TRUE(ddl::IsEager(broadcast.request, 2));
}

TEST(InlinePathTest, DoesNotRunCallsThatDiffer) {
  RunEndpoints({0, 0}, [](std::unique_ptr<ddl::Endpoint> endpoint, int rank) {
    ddl::InlinePath path(*endpoint);
    Sum differs(rank == 0 ? "a" : "b", 10);
    EXPECT_EQ(path.TryRun(differs.request, kLongPatienceUs), 0);
    EXPECT_EQ(differs.data, std::vector<float>(10, 1));
    Sum sum("sum", 10);
    EXPECT_EQ(path.TryRun(sum.request, kLongPatienceUs), 1);
  });
}

TEST(InlinePathTest, WithdrawsWhenOtherRanksDoNotArrive) {
  std::atomic<bool> tried{false};
  RunEndpoints({0, 0}, [&](std::unique_ptr<ddl::Endpoint> endpoint, int rank) {
    ddl::InlinePath path(*endpoint);
    if (rank == 0) {
      Sum alone("alone", 10);
      EXPECT_EQ(path.TryRun(alone.request, 100), 0);
      tried = true;
    }
    while (!tried) std::this_thread::yield();
    Sum sum("sum", 10);
    EXPECT_EQ(path.TryRun(sum.request, kLongPatienceUs), 1);
  });
}

TEST(InlinePathTest, IsOffForRanksOfSeveralGroups) {
  RunEndpoints({0, 1}, [](std::unique_ptr<ddl::Endpoint> endpoint, int) {
    ddl::InlinePath path(*endpoint);
    Sum sum("sum", 10);
    EXPECT_EQ(path.TryRun(sum.request, kLongPatienceUs), 0);
  });
}

}  // namespace
}  // namespace ddl_test
