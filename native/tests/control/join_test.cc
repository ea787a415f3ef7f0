// Ranks that run out of data early join, the others continue, and when all have joined, all continue together.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "several_groups.h"
#include "test_data.h"
#include "thread_group.h"
#include "topologies.h"

namespace ddl_test {
namespace {

struct Join {
  explicit Join(ddl_comm* comm) : call(DDL_JOIN, "") { work = call.Buffer(nullptr, &last, 1).Start(comm); }
  Outcome Finish() { return Call::Finish(work); }

  int32_t last = -1;
  Call call;
  ddl_work* work;
};

// Returns the rank that joined last.
int JoinAndWait(ddl_comm* comm) {
  Join join(comm);
  const Outcome outcome = join.Finish();
  EXPECT_EQ(outcome.code, DDL_OK) << outcome.message;
  return join.last;
}

// Runs one all-reduce and checks every element.
template <typename T>
void ExpectReduced(ddl_comm* comm, ddl_dtype dtype, ddl_op op, size_t count, double mine, double expected) {
  std::vector<T> data(count, static_cast<T>(mine));
  Call call(DDL_ALL_REDUCE, "reduced");
  const Outcome outcome = call.Dtype(dtype).Op(op).Buffer(data.data(), data.data(), count).Run(comm);
  ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
  EXPECT_EQ(data, std::vector<T>(count, static_cast<T>(expected))) << "op " << op << ", dtype " << dtype;
}

class JoinTest : public testing::TestWithParam<size_t> {
 protected:
  const Topology& topology() const { return Topologies()[GetParam()]; }
  int size() const { return topology().size(); }
  void Run(const std::function<void(ddl_comm*, int rank)>& body) {
    RunOptions options;
    options.outer = {topology().outer.begin(), topology().outer.end()};
    RunRanks(topology().group, body, options);
  }
};

// Runs every kind of collective while ranks `first` and above still have data.
void EveryKind(ddl_comm* comm, int rank, int first) {
  const int size = ddl_size(comm);
  const int present = size - first;
  const double sum = static_cast<double>(first + size - 1) * present / 2;
  for (const size_t count : {size_t{0}, size_t{7}, kSanitized ? size_t{9'001} : size_t{70'001}}) {
    ExpectReduced<float>(comm, DDL_FLOAT32, DDL_SUM, count, rank, sum);
    ExpectReduced<double>(comm, DDL_FLOAT64, DDL_MEAN, count, size * rank, sum);
    ExpectReduced<int8_t>(comm, DDL_INT8, DDL_MEAN, count, rank + 1, static_cast<int>((sum + present) / size));
    ExpectReduced<int32_t>(comm, DDL_INT32, DDL_MIN, count, rank + 1, first + 1);
    ExpectReduced<float>(comm, DDL_FLOAT32, DDL_MAX, count, -rank - 1, -first - 1);
    ExpectReduced<int64_t>(comm, DDL_INT64, DDL_PRODUCT, count, 3, std::pow(3, present));
  }
  // Rank r sends row r, of 3 elements, r times.
  std::vector<float> rows(static_cast<size_t>(3 * rank), static_cast<float>(rank));
  Call gather(DDL_ALL_GATHER, "gather");
  ddl_work* const work = gather.Rows(rank, 3).Buffer(rows.data(), nullptr, rows.size()).Start(comm);
  std::vector<float> expected;
  for (int r = first; r < size; ++r) expected.insert(expected.end(), static_cast<size_t>(3 * r), static_cast<float>(r));
  while (ddl_work_wait(work, 1000) == 0) continue;
  ASSERT_EQ(ddl_work_failure(work), nullptr);
  for (int r = 0; r < size; ++r) EXPECT_EQ(ddl_work_rows(work)[r], r < first ? 0u : static_cast<uint64_t>(r));
  const auto* const gathered = static_cast<const float*>(ddl_work_data(work));
  EXPECT_EQ(std::vector<float>(gathered, gathered + expected.size()), expected);
  ddl_work_free(work);

  for (const uint64_t num_rows : {uint64_t{1}, static_cast<uint64_t>(2 * size + 1), uint64_t{20'000}}) {
    const std::vector<float> all(num_rows * 2, static_cast<float>(rank));
    const uint64_t own = num_rows / size + (static_cast<uint64_t>(rank) < num_rows % size ? 1 : 0);
    std::vector<float> chunk(own * 2, -1);
    Call scatter(DDL_REDUCE_SCATTER, "scatter");
    const Outcome outcome = scatter.Rows(num_rows, 2).Buffer(all.data(), chunk.data(), all.size()).Run(comm);
    ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
    EXPECT_EQ(chunk, std::vector<float>(own * 2, static_cast<float>(sum)));
  }
  std::vector<int32_t> from_last(1000, rank);
  Call broadcast(DDL_BROADCAST, "broadcast");
  broadcast.Dtype(DDL_INT32).Root(size - 1).Buffer(from_last.data(), from_last.data(), from_last.size());
  ASSERT_EQ(broadcast.Run(comm).code, DDL_OK);
  EXPECT_EQ(from_last, std::vector<int32_t>(1000, size - 1));
  ASSERT_EQ(Call(DDL_BARRIER, "barrier").Run(comm).code, DDL_OK);
}

// In each step more ranks have joined, but never the last rank.
TEST_P(JoinTest, JoinedRanksContributeAndReceiveNothing) {
  constexpr int kSteps = 3;
  const auto first_in = [&](int step) { return (size() - 1) * step / (kSteps - 1); };
  Run([&](ddl_comm* comm, int rank) {
    for (int round = 0; round < (kSanitized ? 1 : 2); ++round) {
      for (int step = 0; step < kSteps && first_in(step) <= rank; ++step) EveryKind(comm, rank, first_in(step));
      EXPECT_EQ(JoinAndWait(comm), size() - 1);
      EveryKind(comm, rank, 0);
    }
  });
}

// All requests run at once: each rank has its own number of requests, in its own order, and joins while
// they are pending.
TEST_P(JoinTest, WithPendingRequestsInAnyOrder) {
  constexpr int kRequests = kSanitized ? 16 : 60;
  const auto has = [&](int rank) { return kRequests * (rank + 1) / size(); };
  Run([&](ddl_comm* comm, int rank) {
    std::vector<std::vector<float>> data;
    std::vector<std::unique_ptr<Call>> calls;
    std::vector<ddl_work*> works;
    for (int i = 0; i < has(rank); ++i) data.emplace_back(1 + i * 100, static_cast<float>(rank + 1));
    works.resize(data.size());
    for (int i = 0; i < has(rank); ++i) {
      const auto at = static_cast<size_t>((i + rank * 3) % has(rank));
      calls.push_back(std::make_unique<Call>(DDL_ALL_REDUCE, std::to_string(at)));
      works[at] = calls.back()->Buffer(data[at].data(), data[at].data(), data[at].size()).Start(comm);
    }
    EXPECT_GE(JoinAndWait(comm), 0);
    for (int i = 0; i < has(rank); ++i) {
      const auto at = static_cast<size_t>(i);
      ASSERT_EQ(Call::Finish(works[at]).code, DDL_OK);
      float expected = 0;
      for (int r = 0; r < size(); ++r) expected += has(r) > i ? static_cast<float>(r + 1) : 0;
      EXPECT_EQ(data[at], std::vector<float>(data[at].size(), expected)) << i;
    }
    EXPECT_EQ(SumOfOne(comm, "after").code, DDL_OK);
  });
}

INSTANTIATE_TEST_SUITE_P(Topologies, JoinTest, testing::Range<size_t>(0, Topologies().size()),
                         [](const auto& at) { return std::string("ranks_") + Topologies()[at.param].name; });

TEST(JoinErrorTest, CollectivesThatNeedAJoinedRankFailAndTheNextOneWorks) {
  for (const std::vector<int>& group : Groups()) {
    RunRanks(group, [&](ddl_comm* comm, int rank) {
      const int size = ddl_size(comm);
      if (rank > 0) {
        float value = 1;
        Call rootless(DDL_BROADCAST, "weights");
        Call needs_all(DDL_ALL_REDUCE, "sums");
        Call exchange(DDL_ALL_TO_ALL, "rows");
        std::vector<int64_t> to_rank_0(static_cast<size_t>(size));
        to_rank_0[0] = 1;
        exchange.Rows(1, 1).Splits(to_rank_0);
        for (Call* const call : {&rootless.Root(0), &needs_all.Flags(DDL_FLAG_ALL_RANKS), &exchange}) {
          const Outcome outcome = call->Buffer(&value, &value, 1).Run(comm);
          EXPECT_EQ(outcome.code, DDL_FAILED_PRECONDITION) << outcome.message;
          EXPECT_TRUE(Contains(outcome.message, "rank(s) 0 have joined"));
          EXPECT_TRUE(Contains(outcome.message, call == &rootless    ? "broadcast 'weights'"
                                                : call == &needs_all ? "all_reduce 'sums'"
                                                                     : "all_to_all 'rows'"));
          ExpectReduced<float>(comm, DDL_FLOAT32, DDL_SUM, 5, 1, size - 1);
        }
        // The error distinguishes ranks that disagree from ranks that joined.
        Call wrong(DDL_ALL_REDUCE, "wrong");
        std::vector<float> more(2);
        const Outcome outcome = wrong.Buffer(more.data(), more.data(), rank == size - 1 ? 1 : 2).Run(comm);
        EXPECT_EQ(outcome.code, size > 2 ? DDL_FAILED_PRECONDITION : DDL_OK);
        if (size == 4) {
          EXPECT_TRUE(Contains(outcome.message, "2 on rank(s) 1, 2, 1 on rank(s) 3"));
        }
      }
      JoinAndWait(comm);
      EXPECT_EQ(SumOfOne(comm, "together").code, DDL_OK);
    });
  }
}

TEST(JoinErrorTest, AJoinedRankMayNotSubmitButMayJoinAgain) {
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    std::atomic<int> tried{0};
    RunRanks(group, [&](ddl_comm* comm, int rank) {
      if (rank == size - 1) {
        while (tried < size - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(JoinAndWait(comm), size - 1);
      } else {
        Join first(comm);
        Join second(comm);
        const Outcome outcome = SumOfOne(comm, "late");
        EXPECT_EQ(outcome.code, DDL_FAILED_PRECONDITION) << outcome.message;
        EXPECT_TRUE(Contains(outcome.message, "rank " + std::to_string(rank) + ", which has joined"));
        ++tried;
        EXPECT_EQ(first.Finish().code, DDL_OK);
        EXPECT_EQ(second.Finish().code, DDL_OK);
        EXPECT_EQ(first.last, size - 1);
        EXPECT_EQ(second.last, size - 1);
      }
      EXPECT_EQ(SumOfOne(comm, "together").code, DDL_OK);
    });
  }
}

// Collects the warnings of all ranks in a run.
struct Warnings {
  std::mutex mutex;
  std::string text;

  void Install(RunOptions* options) {
    options->warn_user = this;
    options->warn = [](void* user, const char* message) {
      auto& to = *static_cast<Warnings*>(user);
      const std::lock_guard<std::mutex> lock(to.mutex);
      to.text += message;
    };
  }
};

TEST(JoinPatienceTest, AJoinWaitsAsLongAsOthersTrain) {
  for (const std::vector<int>& group : Groups()) {
    Warnings warnings;
    RunOptions options;
    options.warn_after_s = 0.05;
    options.deadline_s = 0.2;
    warnings.Install(&options);
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
          EXPECT_EQ(JoinAndWait(comm), 0);
        },
        options);
    EXPECT_EQ(warnings.text, "");
  }
}

TEST(JoinPatienceTest, ARankThatNeitherTrainsNorJoinsIsNamed) {
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    if (size == 2) continue;
    Warnings warnings;
    RunOptions options;
    options.warn_after_s = 0.1;
    options.deadline_s = 0.5;
    warnings.Install(&options);
    std::atomic<int> failed{0};
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          // Rank 1 joins; the last rank neither joins nor calls the collective.
          if (rank == size - 1) {
            while (failed < size - 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          } else if (rank != 1) {
            const Outcome outcome = SumOfOne(comm, "lonely");
            EXPECT_EQ(outcome.code, DDL_DEADLINE_EXCEEDED) << outcome.message;
            EXPECT_TRUE(Contains(outcome.message, "for rank(s) " + std::to_string(size - 1) + ";"));
            EXPECT_TRUE(Contains(outcome.message, "Rank(s) 1 have joined and are not waited for."));
            ++failed;
          }
          JoinAndWait(comm);
          // No rank can still enter the failed collective.
          EXPECT_EQ(SumOfOne(comm, "lonely").code, DDL_OK);
        },
        options);
    const std::lock_guard<std::mutex> lock(warnings.mutex);
    EXPECT_TRUE(Contains(warnings.text, "for rank(s) " + std::to_string(size - 1) + ";"));
    EXPECT_TRUE(Contains(warnings.text, "Rank(s) 1 have joined"));
  }
}

TEST(JoinLeaveTest, AJoinFailsWhenARankLeavesWithoutIt) {
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    for (const int leaver : {size - 1, 0}) {
      RunOptions options;
      options.leave_early = {leaver};
      RunRanks(
          group,
          [&](ddl_comm* comm, int rank) {
            EXPECT_EQ(SumOfOne(comm, "together").code, DDL_OK);
            if (rank == leaver) {
              std::this_thread::sleep_for(std::chrono::milliseconds(50));
              return;
            }
            for (int turn = 0; turn < 2; ++turn) {
              Join join(comm);
              const Outcome outcome = join.Finish();
              EXPECT_EQ(outcome.code, DDL_UNAVAILABLE) << outcome.message;
              EXPECT_TRUE(Contains(outcome.message, "rank " + std::to_string(leaver) + " has left"));
            }
          },
          options);
    }
  }
}

TEST(JoinLeaveTest, ARankThatLeavesDuringAJoinIsNamed) {
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    for (const int leaver : {size - 1, 0}) {
      RunOptions options;
      options.leave_early = {leaver};
      std::atomic<bool> has_joined{false};
      RunRanks(
          group,
          [&](ddl_comm* comm, int rank) {
            if (rank == leaver) {
              static std::vector<std::unique_ptr<Join>> kept;  // it fails later
              static std::mutex mutex;
              const std::lock_guard<std::mutex> lock(mutex);
              kept.push_back(std::make_unique<Join>(comm));
              while (!has_joined) std::this_thread::sleep_for(std::chrono::milliseconds(1));
              ddl_work_free(kept.back()->work);
              return;
            }
            Outcome outcome;
            while (outcome.code == DDL_OK) {
              float value = 1;
              Call call(DDL_ALL_REDUCE, "loss");
              outcome = call.Buffer(&value, &value, 1).Run(comm);
              if (outcome.code == DDL_OK && value == static_cast<float>(size - 1)) has_joined = true;
            }
            EXPECT_EQ(outcome.code, DDL_UNAVAILABLE) << outcome.message;
            EXPECT_TRUE(Contains(outcome.message, "rank " + std::to_string(leaver) + " has left while join"));
          },
          options);
    }
  }
}

// While a rank has joined, calling threads that run collectives themselves use the coordinator, at once.
TEST(JoinInlineTest, NoRankWaitsAtARendezvousForAJoinedRank) {
  RunRanks({0, 0, 0}, [](ddl_comm* comm, int rank) {
    constexpr uint32_t kLong = 60'000'000;
    float value = 1;
    const auto run = [&](float expected) {
      value = 1;
      Call call(DDL_ALL_REDUCE, "blocking");
      if (call.Buffer(&value, &value, 1).TryRun(comm, kLong) == 0) {
        const Outcome outcome = call.Run(comm);
        ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
      }
      EXPECT_EQ(value, expected);
    };
    for (int turn = 0; turn < 3; ++turn) {
      for (int i = 0; i < 20; ++i) run(3);
      for (int i = 0; i < 20 && rank != 1; ++i) run(2);
      JoinAndWait(comm);
    }
  });
}

}  // namespace
}  // namespace ddl_test
