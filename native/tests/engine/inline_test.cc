// Collectives that calling threads run themselves (ddl_try_run), alone and mixed with others.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "test_data.h"
#include "thread_group.h"

namespace ddl_test {
namespace {

constexpr uint32_t kPatienceUs = 2000;
constexpr uint32_t kLongPatienceUs = 20'000;  // for tests where all ranks must meet, even on a busy machine

// A sum whose result is known: element i of rank r is salt + r + i % 7.
struct Sum {
  Sum(std::string name, int salt, size_t count, int rank)
      : salt(salt), data(count), call(DDL_ALL_REDUCE, std::move(name)) {
    for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(salt + rank + static_cast<int>(i % 7));
    call.Buffer(data.data(), data.data(), count);
  }
  void Check(int size) const {
    for (size_t i = 0; i < data.size(); ++i) {
      const int expected = size * (salt + static_cast<int>(i % 7)) + size * (size - 1) / 2;
      ASSERT_EQ(data[i], static_cast<float>(expected)) << "element " << i;
    }
  }
  int salt;
  std::vector<float> data;
  Call call;
};

// Runs the call like a waiting caller; returns whether the calling thread ran it itself.
bool RunBlocking(ddl_comm* comm, Call& call, uint32_t patience_us = kPatienceUs) {
  if (call.TryRun(comm, patience_us) != 0) return true;
  const Outcome outcome = call.Run(comm);
  EXPECT_EQ(outcome.code, DDL_OK) << outcome.message;
  return false;
}

class InlineTest : public testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
};

// For tests that need another rank, to disagree with or to wait for.
class InlineOthersTest : public InlineTest {};

INSTANTIATE_TEST_SUITE_P(Sizes, InlineOthersTest, testing::Values(2, 3, 4, 8));
INSTANTIATE_TEST_SUITE_P(Sizes, InlineTest, testing::Values(1, 2, 3, 4, 8),
                         [](const auto& info) { return std::to_string(info.param) + "ranks"; });

TEST_P(InlineTest, SumsOfEverySize) {
  std::atomic<int> met{0};
  RunRanks(AllTogether(size()), [&](ddl_comm* comm, int rank) {
    // Empty, one element, sizes near the limit of what the record carries, and sizes that take several slots.
    for (const size_t count : {0u, 1u, 7u, 255u, 4095u, 4096u, 4097u, 200'003u, kSanitized ? 400'003u : 1'000'003u}) {
      for (int turn = 0; turn < 3; ++turn) {
        Sum sum("sum", turn, count, rank);
        if (RunBlocking(comm, sum.call, kLongPatienceUs)) ++met;
        sum.Check(size());
      }
    }
  });
  EXPECT_GT(met, 0);
}

TEST_P(InlineTest, EveryKind) {
  RunRanks(AllTogether(size()), [&](ddl_comm* comm, int rank) {
    for (const size_t count : {3u, 100'003u}) {
      const int root = size() - 1;
      std::vector<int32_t> data(count, rank);
      Call broadcast(DDL_BROADCAST, "broadcast");
      RunBlocking(comm, broadcast.Dtype(DDL_INT32).Root(root).Buffer(data.data(), data.data(), count));
      EXPECT_EQ(data, std::vector<int32_t>(count, root));

      // The integer mean is summed in 64 bits; two buffers are reduced as one.
      std::vector<int8_t> narrow(count, static_cast<int8_t>(120 + rank % 3));
      std::vector<int8_t> second(5, 2);
      Call mean(DDL_ALL_REDUCE, "mean");
      mean.Dtype(DDL_INT8).Op(DDL_MEAN).Buffer(narrow.data(), narrow.data(), count);
      RunBlocking(comm, mean.Buffer(second.data(), second.data(), 5));
      int expected = 0;
      for (int r = 0; r < size(); ++r) expected += 120 + r % 3;
      EXPECT_EQ(narrow, std::vector<int8_t>(count, static_cast<int8_t>(expected / size())));
      EXPECT_EQ(second, std::vector<int8_t>(5, 2));

      std::vector<float> rows(count * static_cast<size_t>(size()), 1.5f);
      std::vector<float> chunk(count);
      Call scatter(DDL_REDUCE_SCATTER, "scatter");
      scatter.Rows(static_cast<uint64_t>(size()), count).Buffer(rows.data(), chunk.data(), rows.size());
      RunBlocking(comm, scatter);
      EXPECT_EQ(chunk, std::vector<float>(count, 1.5f * static_cast<float>(size())));

      Call barrier(DDL_BARRIER, "barrier");
      RunBlocking(comm, barrier);
    }
  });
}

TEST_P(InlineTest, GathersRowsOfDifferentLength) {
  RunRanks(AllTogether(size()), [&](ddl_comm* comm, int rank) {
    std::vector<int64_t> mine(static_cast<size_t>(rank), rank);
    std::vector<int64_t> everything(100);
    Call gather(DDL_ALL_GATHER, "gather");
    gather.Dtype(DDL_INT64).Rows(mine.size(), 1).Buffer(mine.data(), nullptr, mine.size());
    gather.request.user = everything.data();
    gather.request.allocate = [](void* user, const uint64_t*, int) { return user; };
    if (!gather.TryRun(comm, kPatienceUs)) {
      ddl_work* work = gather.Start(comm);  // with the same result memory
      ASSERT_EQ(ddl_work_wait(work, 30'000), 1);
      ddl_work_free(work);
    }
    size_t at = 0;
    for (int r = 0; r < size(); ++r) {
      for (int i = 0; i < r; ++i) EXPECT_EQ(everything[at++], r);
    }
  });
}

// Some ranks submit the same collective the ordinary way, arrive late, or call from several threads: whichever
// way each call takes, results are right and nothing hangs.
TEST_P(InlineTest, MixesWithSubmittedRequests) {
  constexpr int kCalls = kSanitized ? 60 : 300;
  RunRanks(AllTogether(size()), [&](ddl_comm* comm, int rank) {
    std::thread other([&] {
      Random random(static_cast<uint64_t>(rank) + 100);
      std::vector<std::unique_ptr<Sum>> sums;
      std::vector<ddl_work*> works;
      for (int i = 0; i < kCalls; ++i) {
        sums.push_back(std::make_unique<Sum>("async." + std::to_string(i), i, 50, rank));
        works.push_back(sums.back()->call.Start(comm));
        if (random.Below(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.Below(300)));
        if (random.Below(8) != 0) continue;
        Call::Finish(works.back());
        works.back() = nullptr;
      }
      for (ddl_work* work : works) {
        if (work != nullptr) Call::Finish(work);
      }
      for (const auto& sum : sums) sum->Check(size());
    });
    Random random(static_cast<uint64_t>(rank) + 1);
    for (int i = 0; i < kCalls; ++i) {
      Sum sum("blocking", i, i % 5 == 0 ? 30'000 : 20, rank);
      // Some ranks do not try, and some arrive late.
      if (random.Below(16) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.Below(3000)));
      if (random.Below(8) == 0 || !sum.call.TryRun(comm, static_cast<uint32_t>(random.Below(500)))) {
        const Outcome outcome = sum.call.Run(comm);
        ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
      }
      sum.Check(size());
    }
    other.join();
  });
}

TEST_P(InlineOthersTest, DisagreementIsLeftToTheCoordinator) {
  RunRanks(AllTogether(size()), [&](ddl_comm* comm, int rank) {
    for (int turn = 0; turn < 3; ++turn) {
      Sum wrong("same name", 1, rank == 1 ? 40 : 41, rank);
      ASSERT_FALSE(wrong.call.TryRun(comm, kPatienceUs));
      const Outcome outcome = wrong.call.Run(comm);
      EXPECT_EQ(outcome.code, DDL_FAILED_PRECONDITION);
      EXPECT_NE(outcome.message.find("number of elements"), std::string::npos) << outcome.message;
      Sum right("same name", 2, 41, rank);
      RunBlocking(comm, right.call);
      right.Check(size());
    }
  });
}

TEST_P(InlineOthersTest, DoesNotWaitLongForAbsentRanks) {
  RunRanks(AllTogether(size()), [&](ddl_comm* comm, int rank) {
    if (rank == 0) {
      const auto start = std::chrono::steady_clock::now();
      Sum alone("alone", 1, 3, rank);
      EXPECT_FALSE(alone.call.TryRun(comm, 1000));
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    }
    Sum together("together", 2, 3, rank);
    RunBlocking(comm, together.call);
    together.Check(size());
  });
}

TEST(Inline, RefusesUnsuitableRequests) {
  RunRanks({0, 0, 2, 2}, [](ddl_comm* comm, int rank) {
    Sum sum("several groups", 1, 3, rank);
    EXPECT_FALSE(sum.call.TryRun(comm, kPatienceUs));
    RunBlocking(comm, sum.call);
    sum.Check(4);
  });
  RunRanks({0, 0}, [](ddl_comm* comm, int rank) {
    Sum nameless("", 1, 3, rank);
    EXPECT_FALSE(nameless.call.TryRun(comm, kPatienceUs));
    Sum checked("checked", 1, 3, rank);
    checked.call.Flags(DDL_FLAG_CHECK);
    EXPECT_FALSE(checked.call.TryRun(comm, kPatienceUs));
  });
}

TEST(Inline, DoesNotWaitForARankThatLeft) {
  RunOptions options;
  options.leave_early = {1};
  RunRanks(
      {0, 0},
      [](ddl_comm* comm, int rank) {
        if (rank == 1) return;
        Sum sum("lonely", 1, 3, rank);
        EXPECT_FALSE(sum.call.TryRun(comm, 1000));
        EXPECT_EQ(sum.call.Run(comm).code, DDL_UNAVAILABLE);
        EXPECT_FALSE(sum.call.TryRun(comm, 1000));
      },
      options);
}

// Rank 1 stalls in the middle of a collective until rank 0, which is interrupted, has returned.
TEST(Inline, AnInterruptedCallerReturnsWhileAnotherRankStalls) {
  for (const bool goes_on : {false, true}) {
    std::atomic<bool> back{false};
    std::atomic<int> asked{0};
    RunRanks({0, 0}, [&](ddl_comm* comm, int rank) {
      struct Shared {
        std::function<void()> stand_still;
        std::atomic<int>* asked;
        std::vector<int64_t> rows;
      } shared{[] {}, &asked, std::vector<int64_t>(2)};
      if (rank == 1) {
        shared.stand_still = [&] {
          const auto start = std::chrono::steady_clock::now();
          const auto enough = std::chrono::milliseconds(goes_on ? 400 : 20'000);
          while (!back && std::chrono::steady_clock::now() - start < enough) std::this_thread::yield();
        };
      }
      int64_t mine = rank;
      Call gather(DDL_ALL_GATHER, "gather");
      gather.Dtype(DDL_INT64).Rows(1, 1).Buffer(&mine, nullptr, 1);
      gather.request.user = &shared;
      gather.request.allocate = [](void* user, const uint64_t*, int) {
        static_cast<Shared*>(user)->stand_still();
        return static_cast<void*>(static_cast<Shared*>(user)->rows.data());
      };
      if (rank == 0) {
        gather.request.interrupted = [](void* user) { return ++*static_cast<Shared*>(user)->asked; };
      }
      const auto start = std::chrono::steady_clock::now();
      const int ran = gather.TryRun(comm, 10'000'000);
      const auto took = std::chrono::steady_clock::now() - start;
      if (rank == 0) back = true;
      if (goes_on) {
        EXPECT_EQ(ran, rank == 0 ? 2 : 1);
        EXPECT_EQ(shared.rows, (std::vector<int64_t>{0, 1}));
        Sum next("next", 1, 3, rank);
        RunBlocking(comm, next.call);
        return;
      }
      EXPECT_LT(took, std::chrono::seconds(10)) << rank;
      EXPECT_EQ(rank == 0 ? ran : 0, 0);
      const Outcome next = Sum("next", 1, 3, rank).call.Run(comm);
      EXPECT_EQ(next.code, DDL_ABORTED) << next.message;
      EXPECT_NE(next.message.find("was interrupted (Ctrl-C or another signal) during 'gather'"), std::string::npos)
          << rank << ": " << next.message;
    });
    EXPECT_EQ(asked, 1);  // an interrupted caller is not asked again
  }
}

}  // namespace
}  // namespace ddl_test
