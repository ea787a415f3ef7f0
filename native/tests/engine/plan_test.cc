// Planned collectives run in the order of the plan without a message to rank 0. Also tests ranks that depart from
// the plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "engine/engine_block.h"
#include "engine/plan_steps.h"
#include "test_data.h"
#include "thread_group.h"
#include "topologies.h"
#include "transport_spy.h"

namespace ddl_test {
namespace {

class PlanTest : public testing::TestWithParam<size_t> {
 protected:
  const Topology& topology() const { return Topologies()[GetParam()]; }
  const std::vector<int>& group() const { return topology().group; }
  int size() const { return topology().size(); }
  RunOptions options() const {
    RunOptions options = WithLane();
    options.warn_after_s = 0;
    options.outer = std::vector<int32_t>(topology().outer.begin(), topology().outer.end());
    return options;
  }
};

TEST_P(PlanTest, StepsRunWithoutAMessageToRankZero) {
  constexpr uint64_t kSteps = 20;
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        const ddl_counters before = Count(comm);
        for (uint64_t step = 1; step <= kSteps; ++step) RunStep(comm, 1, step, rank);
        const ddl_counters after = Count(comm);
        EXPECT_EQ(after.control_sent - before.control_sent, 0u);
        EXPECT_EQ(after.control_received - before.control_received, 0u);
        EXPECT_EQ(after.coordinated, 0u);
        EXPECT_EQ(after.planned, kSteps * kBuckets);
        EXPECT_EQ(after.fell_back, 0u);
      },
      options());
}

TEST_P(PlanTest, UnplannedCollectivesRunBesidePlannedOnes) {
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        std::thread other([&] {
          for (int i = 0; i < 20; ++i) {
            std::vector<float> data(5000, static_cast<float>(i + rank));
            const Outcome outcome =
                Call(DDL_ALL_REDUCE, "other").Buffer(data.data(), data.data(), data.size()).Run(comm);
            EXPECT_EQ(outcome.code, DDL_OK) << outcome.message;
            EXPECT_EQ(data[4999], static_cast<float>(i * size() + size() * (size() - 1) / 2));
          }
        });
        for (uint64_t step = 1; step <= 20; ++step) RunStep(comm, 1, step, rank);
        other.join();
        EXPECT_EQ(Count(comm).coordinated, 20u);
        EXPECT_EQ(Count(comm).fell_back, 0u);
      },
      options());
}

TEST_P(PlanTest, ARankThatDepartsIsNamedOnAllRanks) {
  if (size() == 1) return;
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        RunStep(comm, 1, 1, rank);
        PlannedSum first(1, 2, 0, rank);
        PlannedSum second(1, 2, 1, rank, rank == 1 ? 999 : 1000);
        first.work = first.call.Start(comm);
        second.work = second.call.Start(comm);
        first.Check(size());
        const Outcome outcome = Call::Finish(second.work);
        EXPECT_EQ(outcome.code, DDL_FAILED_PRECONDITION);
        EXPECT_NE(outcome.message.find("ranks disagree on 'plan1/1': number of elements: 1000 on rank(s) 0"),
                  std::string::npos)
            << outcome.message;
        EXPECT_NE(outcome.message.find("999 on rank(s) 1"), std::string::npos) << outcome.message;
        for (uint64_t step = 3; step < 6; ++step) RunStep(comm, 1, step, rank);
        EXPECT_EQ(Count(comm).fell_back, 1u);
        EXPECT_EQ(Count(comm).planned, 4u * kBuckets + 1);
      },
      options());
}

INSTANTIATE_TEST_SUITE_P(Topologies, PlanTest, testing::Range(size_t{0}, Topologies().size()),
                         [](const auto& info) { return Topologies()[info.param].name; });

TEST(PlanOfRanksTest, ALateRankBlocksNothingAndThePlanContinues) {
  for (const std::vector<int>& group : {std::vector<int>{0, 0, 0}, {0, 0, 2, 2}, {0, 1, 2, 3, 4}}) {
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          RunUntilPlanned(comm, 1, rank);
          const uint64_t before = Count(comm).fell_back;
          if (rank == 1) Sleep(0.5);
          RunStep(comm, 1, 1000, rank);
          EXPECT_EQ(Count(comm).fell_back, before + kBuckets);
          RunUntilPlanned(comm, 1001, rank);
        },
        WithLane());
  }
}

TEST(PlanOfRanksTest, PlansOfSeveralThreadsRunInAnyOrder) {
  for (const std::vector<int>& group : {std::vector<int>{0, 0}, {0, 0, 2, 2}, {0, 1, 2}}) {
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          std::vector<std::thread> threads;
          for (uint64_t t = 0; t < 3; ++t) {
            threads.emplace_back([&, plan = (t + static_cast<uint64_t>(rank)) % 3] {
              for (uint64_t step = 1; step <= 10; ++step) RunStep(comm, plan + 1, step, rank);
            });
            Sleep(0.01);
          }
          for (std::thread& thread : threads) thread.join();
          EXPECT_EQ(Count(comm).planned + Count(comm).fell_back, 30u * kBuckets);
        },
        WithLane());
  }
}

TEST(PlanOfRanksTest, ARankThatSkipsABucketIsNamed) {
  RunOptions options = WithLane();
  options.deadline_s = 1;
  std::atomic<int> told{0};
  RunRanks(
      {0, 0, 2},
      [&](ddl_comm* comm, int rank) {
        RunStep(comm, 1, 1, rank);
        PlannedSum first(1, 2, 0, rank);
        first.work = first.call.Start(comm);
        first.Check(3);
        if (rank == 2) {
          while (told < 2) Sleep(0.01);
        } else {
          PlannedSum second(1, 2, 1, rank);
          const Outcome outcome = second.call.Run(comm);
          EXPECT_EQ(outcome.code, DDL_DEADLINE_EXCEEDED) << outcome.message;
          EXPECT_NE(outcome.message.find("for rank(s) 2"), std::string::npos) << outcome.message;
          ++told;
        }
        RunUntilPlanned(comm, 3, rank);
      },
      options);
}

// Rank 1 never begins a run that the others have begun, so their run numbers differ until they agree.
TEST(PlanOfRanksTest, ARankThatSkipsAWholeRunIsNamedAndThePlanContinues) {
  for (const std::vector<int>& group : {std::vector<int>{0, 0}, {0, 0, 2, 2}, {0, 1, 2}}) {
    for (const int absent : {0, 1}) {
      RunRanks(
          group,
          [&](ddl_comm* comm, int rank) {
            RunUntilPlanned(comm, 1, rank);
            PlannedSum first(1, 1000, 0, rank, rank == absent ? 999 : 1000);
            if (rank == absent) first.call.request.plan_size = 0;  // unplanned
            const Outcome outcome = first.call.Run(comm);
            EXPECT_EQ(outcome.code, DDL_FAILED_PRECONDITION) << outcome.message;
            RunUntilPlanned(comm, 1001, rank);
          },
          WithLane());
    }
  }
}

// Rank 1 stalls in the middle of a bucket; requests submitted meanwhile fail together with the bucket.
TEST(PlanOfRanksTest, RequestsDuringAFailingBucketFailWithIt) {
  auto spies = Spies(2);
  spies[1]->withholds = [](const Spy::Message& message) { return CarriesData(message.tag); };
  RunOptions options = WithLane();
  options.warn_after_s = 0;  // the first bucket runs in the lane, however late a rank is
  options.deadline_s = 1;
  options.tweak_lane = [&spies](ddl_transport& t) { spies[static_cast<size_t>(t.rank)]->Install(t); };
  RunRanks(
      {0, 1},
      [&](ddl_comm* comm, int rank) {
        PlannedSum first(1, 1, 0, rank, 1'000'000);
        PlannedSum second(1, 1, 1, rank);
        first.work = first.call.Start(comm);
        Sleep(0.5);
        if (rank == 0) second.work = second.call.Start(comm);
        const Outcome outcome = Call::Finish(first.work);
        EXPECT_TRUE(outcome.code == DDL_DEADLINE_EXCEEDED || outcome.code == DDL_ABORTED) << outcome.message;
        if (rank != 0) return;
        const Outcome other = Call::Finish(second.work);
        EXPECT_EQ(other.code, outcome.code) << other.message;
        EXPECT_NE(other.message.find("no progress for"), std::string::npos) << other.message;
      },
      options);
}

TEST(PlanOfRanksTest, OtherRanksLearnThatARankLeft) {
  for (const std::vector<int>& group : {std::vector<int>{0, 0, 0}, {0, 1, 2}}) {
    RunOptions options = WithLane();
    options.leave_early = {2};
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          RunStep(comm, 1, 1, rank);
          if (rank == 2) return;
          PlannedSum bucket(1, 2, 0, rank);
          const Outcome outcome = bucket.call.Run(comm);
          EXPECT_EQ(outcome.code, DDL_UNAVAILABLE) << outcome.message;
          EXPECT_NE(outcome.message.find("rank 2 has left"), std::string::npos) << outcome.message;
        },
        options);
  }
}

// As in a step: small sums run at a rendezvous if all ranks arrive, otherwise in their turn.
TEST(PlanOfRanksTest, SmallSumsRunInlineOrInTheirTurn) {
  std::atomic<uint64_t> ran_inline{0};
  RunOptions options = WithLane();
  options.warn_after_s = 0;
  RunRanks(
      {0, 0},
      [&](ddl_comm* comm, int rank) {
        for (uint64_t step = 1; step <= 50; ++step) {
          std::vector<std::unique_ptr<PlannedSum>> buckets;
          for (uint32_t i = 0; i < kBuckets; ++i) {
            buckets.push_back(std::make_unique<PlannedSum>(1, step, i, rank, i % 2 == 0 ? 100 : 50000));
            PlannedSum& bucket = *buckets.back();
            if (i % 2 != 0 || bucket.call.TryRun(comm, step % 2 == 0 ? 2000 : 0) == 0)
              bucket.work = bucket.call.Start(comm);
          }
          for (auto& bucket : buckets) {
            if (bucket->work != nullptr) {
              bucket->Check(2);
            } else {
              EXPECT_EQ(bucket->data, std::vector<float>(100, bucket->first * 3));
            }
          }
        }
        const ddl_counters counters = Count(comm);
        EXPECT_EQ(counters.fell_back, 0u);
        EXPECT_EQ(counters.planned + counters.ran_inline, 50u * kBuckets);
        EXPECT_EQ(counters.coordinated, 0u);
        ran_inline += counters.ran_inline;
      },
      options);
  EXPECT_GT(ran_inline, 0u);
}

// The other rank would wait in vain, because this rank's plan ends before its calling thread reaches a rendezvous.
TEST(PlanOfRanksTest, NoRankWaitsAtARendezvousForSmallPlannedData) {
  RunOptions options = WithLane();
  options.warn_after_s = 0;
  RunRanks(
      {0, 0},
      [&](ddl_comm* comm, int rank) {
        std::vector<std::unique_ptr<PlannedSum>> buckets;
        for (uint32_t i = 0; i < kBuckets; ++i) buckets.push_back(std::make_unique<PlannedSum>(1, 1, i, rank, 100));
        if (rank == 0) {
          const auto start = std::chrono::steady_clock::now();
          EXPECT_EQ(buckets[0]->call.TryRun(comm, 20'000'000), 0);
          EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));  // a lane's patience: 2 s
        }
        for (auto& bucket : buckets) bucket->work = bucket->call.Start(comm);
        for (auto& bucket : buckets) bucket->Check(2);
      },
      options);
}

TEST(PlanOfRanksTest, RepeatedUnplannedCollectivesAreAnnouncedInThirteenBytes) {
  RunRanks({0, 0, 2}, [&](ddl_comm* comm, int rank) {
    const auto run = [&] {
      std::vector<float> data(1000, 1);
      const Outcome outcome = Call(DDL_ALL_REDUCE, "again").Buffer(data.data(), data.data(), 1000).Run(comm);
      EXPECT_EQ(outcome.code, DDL_OK) << outcome.message;
      EXPECT_EQ(data[999], 3);
    };
    for (int i = 0; i < 5; ++i) run();
    const ddl_counters before = Count(comm);
    for (int i = 0; i < 10; ++i) run();
    const ddl_counters after = Count(comm);
    if (rank == 0) return;
    EXPECT_EQ(after.control_sent - before.control_sent, 10u);
    EXPECT_EQ(after.control_bytes_sent - before.control_bytes_sent, 130u);
    EXPECT_EQ(after.control_bytes_received - before.control_bytes_received, 90u);
  });
}

// A lane's count of running requests decides whether every rendezvous wakes its thread.
TEST(PlanOfRanksTest, RequestsThatFallBackNoLongerCountInTheLane) {
  static std::atomic<ddl::RankBlock*> blocks{nullptr};
  static std::atomic<void* (*)(void*, int, size_t)> share{nullptr};
  RunOptions options = WithLane();
  options.tweak_lane = [](ddl_transport& transport) {
    share = transport.share;
    transport.share = [](void* self, int leader, size_t bytes) {
      void* const block = share.load()(self, leader, bytes);
      blocks = static_cast<ddl::RankBlock*>(block);
      return block;
    };
  };
  RunRanks(
      {0, 0},
      [&](ddl_comm* comm, int rank) {
        RunStep(comm, 1, 1, rank);
        PlannedSum differs(1, 2, 0, rank, rank == 1 ? 999 : 1000);
        differs.work = differs.call.Start(comm);
        EXPECT_EQ(Call::Finish(differs.work).code, DDL_FAILED_PRECONDITION);
        EXPECT_EQ(Count(comm).fell_back, 1u);
        EXPECT_EQ(ddl::EngineBlockOf(blocks.load()[rank]).outstanding, 0u);
      },
      options);
}

TEST(PlanOfRanksTest, UnsuitableRequestsAreRefused) {
  RunRanks({0}, [&](ddl_comm* comm, int) {
    PlannedSum bucket(1, 1, 0, 0);
    bucket.call.request.plan_index = kBuckets;
    EXPECT_EQ(bucket.call.Run(comm).code, DDL_INVALID_ARGUMENT);
    Call gather(DDL_BROADCAST, "b");
    gather.Buffer(bucket.data.data(), bucket.data.data(), 10);
    gather.request.plan_size = 1;
    EXPECT_EQ(gather.Run(comm).code, DDL_INVALID_ARGUMENT);
  });
}

}  // namespace
}  // namespace ddl_test
