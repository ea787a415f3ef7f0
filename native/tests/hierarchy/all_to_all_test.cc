// Rows from every rank to every rank on every topology, however uneven the splits, and errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "several_groups.h"
#include "test_data.h"
#include "thread_group.h"
#include "topologies.h"
#include "transport_spy.h"

namespace ddl_test {
namespace {

using Bytes = std::vector<uint8_t>;
// Number of rows that rank `from` sends to rank `to`.
using Plan = std::function<int64_t(int from, int to)>;

// One all_to_all on one rank.
struct Exchange {
  Exchange(ddl_comm* comm, const Plan& plan, ddl_dtype dtype, size_t row_count, const std::string& name = "exchange")
      : size(ddl_size(comm)), call(DDL_ALL_TO_ALL, name) {
    const int me = ddl_rank(comm);
    std::vector<int64_t> splits;
    for (int r = 0; r < size; ++r) {
      const Bytes leaving = Rows(plan, dtype, row_count, me, r);
      const Bytes coming = Rows(plan, dtype, row_count, r, me);
      in.insert(in.end(), leaving.begin(), leaving.end());
      expected.insert(expected.end(), coming.begin(), coming.end());
      splits.push_back(plan(me, r));
      expected_rows.push_back(static_cast<uint64_t>(plan(r, me)));
    }
    const auto rows = static_cast<uint64_t>(std::accumulate(splits.begin(), splits.end(), int64_t{0}));
    call.Dtype(dtype).Rows(rows, row_count).Splits(splits).Buffer(in.data(), nullptr, rows * row_count);
  }

  // Random bits, different for each pair of ranks.
  static Bytes Rows(const Plan& plan, ddl_dtype dtype, size_t row_count, int from, int to) {
    const uint64_t seed = 100 + 10 * static_cast<uint64_t>(from) + static_cast<uint64_t>(to);
    return RandomElements(dtype, static_cast<size_t>(plan(from, to)) * row_count, seed);
  }

  void RunAndCheck(ddl_comm* comm) { Check(call.Start(comm)); }

  void Check(ddl_work* work) {
    ASSERT_EQ(ddl_work_wait(work, 60'000), 1);
    ASSERT_EQ(ddl_work_failure(work), nullptr);
    EXPECT_EQ(std::vector<uint64_t>(ddl_work_rows(work), ddl_work_rows(work) + size), expected_rows);
    EXPECT_TRUE(expected.empty() || std::memcmp(ddl_work_data(work), expected.data(), expected.size()) == 0);
    ddl_work_free(work);
  }

  // Like a caller that may run it itself; returns whether it did.
  bool TryAndCheck(ddl_comm* comm) {
    Bytes out(expected.size());
    std::vector<uint64_t> rows;
    struct Output {
      void* data;
      std::vector<uint64_t>& rows;
    } output{out.data(), rows};
    call.request.user = &output;
    call.request.allocate = [](void* user, const uint64_t* from_each, int ranks) {
      auto& to = *static_cast<Output*>(user);
      to.rows.assign(from_each, from_each + ranks);
      return to.data;
    };
    if (call.TryRun(comm, 20'000) == 0) {
      call.request.allocate = nullptr;  // Check reads the memory that the work allocates
      RunAndCheck(comm);
      return false;
    }
    EXPECT_EQ(rows, expected_rows);
    EXPECT_TRUE(out == expected);
    return true;
  }

  int size;
  Call call;
  Bytes in;
  Bytes expected;
  std::vector<uint64_t> expected_rows;
};

// Splits: equal, different for each pair, none for some ranks or pairs, all to one, all from one, none at all. With
// the smallest slots, also more than a slot holds, evenly and from one rank to another.
std::vector<Plan> Plans(int size) {
  return {[](int, int) { return 3; },
          [](int from, int to) { return 1 + from + 7 * to; },
          [](int from, int to) { return from % 2 == 0 || to % 3 == 0 ? 0 : from + to; },
          [size](int from, int to) { return to == size - 1 ? 5 + from : 0; },
          [](int from, int to) { return from == 0 ? 5 + to : 0; },
          [](int, int) { return 0; },
          [](int from, int to) { return 4'000 + 171 * from + 13 * to; },
          [size](int from, int to) { return from == 0 && to == size - 1 ? 20'011 : 1; }};
}

class AllToAllTest : public testing::TestWithParam<size_t> {
 protected:
  const Topology& topology() const { return Topologies()[GetParam()]; }
  int size() const { return topology().size(); }
  // Smallest slots, unless `large`.
  void Run(const std::function<void(ddl_comm*, int rank)>& body, bool large = false) {
    RunOptions options;
    options.outer = {topology().outer.begin(), topology().outer.end()};
    if (!large) options.staging_bytes = 1;
    RunRanks(topology().group, body, options);
  }
};

TEST_P(AllToAllTest, UnevenRows) {
  // Only bytes are moved, so one dtype is enough under a sanitizer.
  const std::vector<ddl_dtype> dtypes =
      kSanitized ? std::vector<ddl_dtype>{DDL_INT8} : std::vector<ddl_dtype>{DDL_FLOAT32, DDL_FLOAT64, DDL_INT8};
  Run([&](ddl_comm* comm, int) {
    for (const Plan& plan : Plans(size())) {
      for (const size_t row_count : {size_t{1}, size_t{5}, size_t{0}}) {
        for (const ddl_dtype dtype : dtypes) {
          Exchange(comm, plan, dtype, row_count).RunAndCheck(comm);
        }
      }
    }
  });
}

TEST_P(AllToAllTest, EveryDtype) {
  Run([&](ddl_comm* comm, int) {
    for (int dtype = 0; dtype < DDL_NUM_DTYPES; ++dtype) {
      Exchange(comm, Plans(size())[1], static_cast<ddl_dtype>(dtype), 3).RunAndCheck(comm);
    }
  });
}

TEST_P(AllToAllTest, MoreThanCanBeInProgressAtOnce) {
  if (kSanitized && size() > 4) GTEST_SKIP() << "too slow under a sanitizer";
  // More than a slot, and between two ranks more than may be in progress in one direction (2 MiB).
  const Plan plan = [](int from, int to) { return from == 1 && to == 0 ? 700'001 : 100'003 + from + to; };
  Run([&](ddl_comm* comm, int) { Exchange(comm, plan, DDL_FLOAT32, 1).RunAndCheck(comm); }, true);
}

// Under other names, in a different order on each rank, among all-reduces that need the same memory.
TEST_P(AllToAllTest, AmongOtherCollectives) {
  constexpr int kRounds = kSanitized ? 5 : 30;
  Run([&](ddl_comm* comm, int rank) {
    for (int round = 0; round < kRounds; ++round) {
      std::vector<float> data(5'000, 1);
      Call sum(DDL_ALL_REDUCE, "sum");
      sum.Buffer(data.data(), data.data(), data.size());
      Exchange exchange(comm, Plans(size())[static_cast<size_t>(round) % 5], DDL_INT32, 40);
      ddl_work* const first = (rank + round) % 2 == 0 ? sum.Start(comm) : nullptr;
      exchange.RunAndCheck(comm);
      ASSERT_EQ(Call::Finish(first != nullptr ? first : sum.Start(comm)).code, DDL_OK);
      EXPECT_EQ(data, std::vector<float>(5'000, static_cast<float>(size())));
    }
  });
}

// Rank 0 sends each rank different decisions, more than the mailboxes hold at once; no rank starts before all ranks of
// its group know.
TEST_P(AllToAllTest, ManyAtOnceUnderLongNames) {
  constexpr size_t kCalls = kSanitized ? 80 : 150;
  Run([&](ddl_comm* comm, int rank) {
    std::vector<std::unique_ptr<Exchange>> exchanges;
    std::vector<ddl_work*> works(kCalls);
    for (size_t i = 0; i < kCalls; ++i) {
      const std::string name = std::to_string(i) + std::string(1000, 'n');
      exchanges.push_back(std::make_unique<Exchange>(comm, Plans(size())[i % 5], DDL_INT32, 2, name));
    }
    for (size_t i = 0; i < kCalls; ++i) {
      const size_t at = (i + static_cast<size_t>(rank) * 7) % kCalls;
      works[at] = exchanges[at]->call.Start(comm);
    }
    for (size_t i = 0; i < kCalls; ++i) exchanges[i]->Check(works[i]);
  });
}

INSTANTIATE_TEST_SUITE_P(Topologies, AllToAllTest, testing::Range(size_t{0}, Topologies().size()),
                         [](const auto& info) { return std::string("of_") + Topologies()[info.param].name; });

TEST(AllToAllInlineTest, OnCallingThreads) {
  for (const int size : {1, 2, 3, kSanitized ? 4 : 8}) {
    std::atomic<int> met{0};
    RunRanks(AllTogether(size), [&](ddl_comm* comm, int) {
      for (const Plan& plan : Plans(size)) {
        for (const size_t row_count : {size_t{1}, size_t{0}, size_t{40}}) {
          if (Exchange(comm, plan, DDL_FLOAT32, row_count).TryAndCheck(comm)) ++met;
        }
      }
    });
    EXPECT_GT(met, 0);
  }
}

TEST(AllToAllErrorTest, WrongSplitsOfOneRankFailEverywhereAndTheNextOneWorks) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  // Wrong splits of one rank, for 4 rows: too few, too many, negative, and a sum that overflows 64 bits to 4.
  const std::vector<std::vector<int64_t>> wrong = {{3, 0}, {3, 2}, {5, -1}, {kMost, kMost}};
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    for (const int odd_rank : {0, size - 1}) {
      std::mutex mutex;
      std::vector<std::string> messages;
      RunRanks(group, [&](ddl_comm* comm, int rank) {
        for (const auto& first : wrong) {
          std::vector<int64_t> splits(static_cast<size_t>(size));
          splits[0] = 4;
          if (rank == odd_rank) std::copy(first.begin(), first.end(), splits.begin());
          const std::vector<float> in(4);
          Call call(DDL_ALL_TO_ALL, "tokens");
          call.Rows(4, 1).Splits(splits).Buffer(in.data(), nullptr, 4);
          call.request.allocate = [](void*, const uint64_t*, int) -> void* { return nullptr; };
          EXPECT_EQ(call.TryRun(comm, 0), 0);
          const Outcome outcome = call.Run(comm);
          EXPECT_EQ(outcome.code, DDL_INVALID_ARGUMENT) << outcome.message;
          EXPECT_EQ(outcome.roles, (std::map<int, uint32_t>{{odd_rank, DDL_RANK_NAMED}}));
          EXPECT_TRUE(Contains(outcome.message, "all_to_all 'tokens'"));
          EXPECT_TRUE(Contains(outcome.message, "Received: 4 rows in splits of " + std::to_string(first[0]) + ", " +
                                                    std::to_string(first[1])));
          EXPECT_TRUE(Contains(outcome.message, "on rank " + std::to_string(odd_rank) + "."));
          Exchange(comm, Plans(size)[1], DDL_FLOAT32, 2).RunAndCheck(comm);
          const std::lock_guard<std::mutex> lock(mutex);
          messages.push_back(std::to_string(first[0]) + std::to_string(first[1]) + outcome.message);
        }
      });
      std::sort(messages.begin(), messages.end());
      EXPECT_EQ(std::unique(messages.begin(), messages.end()) - messages.begin(), static_cast<long>(wrong.size()));
    }
  }
}

// No message of rank 1 ever finishes. The first rank that reaches the deadline names what it waits for, and all fail
// with its error.
TEST(AllToAllErrorTest, WithoutProgressItFailsAtTheDeadlineOnEveryRank) {
  auto spies = Spies(4);
  spies[1]->withholds = [](const Spy::Message& message) { return message.tag == 104; };
  RunOptions options = Spied(spies);
  options.deadline_s = 2.0;
  RunRanks(
      {0, 0, 2, 2},
      [&](ddl_comm* comm, int rank) {
        Exchange exchange(comm, [](int, int) { return 100'000; }, DDL_FLOAT32, 1);
        const Outcome outcome = exchange.call.Run(comm);
        EXPECT_TRUE(outcome.code == DDL_DEADLINE_EXCEEDED || outcome.code == DDL_ABORTED) << outcome.message;
        EXPECT_TRUE(Contains(outcome.message, "no progress for"));
        EXPECT_TRUE(Contains(outcome.message, "waiting for a message") ||
                    Contains(outcome.message, "waiting for rank 1"));
        EXPECT_EQ(spies[static_cast<size_t>(rank)]->DataUnderWay(), 0u);
      },
      options);
}

TEST(AllToAllErrorTest, ATransportFailureEndsItOnEveryRank) {
  for (const int sends : {0, 1, 5}) {
    auto spies = Spies(4);
    spies[2]->sends_until_failure = sends;
    RunRanks(
        {0, 0, 2, 2},
        [&](ddl_comm* comm, int rank) {
          Exchange exchange(comm, [](int, int) { return kSanitized ? 150'000 : 400'000; }, DDL_FLOAT32, 1);
          const Outcome outcome = exchange.call.Run(comm);
          EXPECT_EQ(outcome.code, DDL_ABORTED) << outcome.message;
          exchange.in.clear();  // the address sanitizer would report a late message
          exchange.in.shrink_to_fit();
          EXPECT_EQ(spies[static_cast<size_t>(rank)]->DataUnderWay(), 0u);
        },
        Spied(spies));
  }
}

TEST(AllToAllErrorTest, ARankThatLeavesBeforeItIsNamed) {
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    RunOptions options;
    options.leave_early = {size - 1};
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          Exchange(comm, Plans(size)[1], DDL_FLOAT32, 2).RunAndCheck(comm);
          if (rank == size - 1) return;
          Exchange late(comm, Plans(size)[1], DDL_FLOAT32, 2);
          const Outcome outcome = late.call.Run(comm);
          EXPECT_EQ(outcome.code, DDL_UNAVAILABLE) << outcome.message;
          EXPECT_TRUE(Contains(outcome.message, "rank " + std::to_string(size - 1)));
        },
        options);
  }
}

}  // namespace
}  // namespace ddl_test
