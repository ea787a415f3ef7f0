// A rank fails in the middle of a step: the other ranks' collectives are cancelled, and all continue afterwards.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/waiter.h"
#include "control/announced.h"
#include "control/coordinator.h"
#include "engine/plan_steps.h"
#include "thread_group.h"

namespace ddl_test {
namespace {

// Does what every rank does after a failed step.
void ComeTogether(ddl_comm* comm, int rank) {
  EXPECT_EQ(Call(DDL_BARRIER, "failed").Flags(DDL_FLAG_CANCELS).Run(comm).code, DDL_OK);
  std::vector<float> data(1, static_cast<float>(rank));
  const Outcome outcome =
      Call(DDL_ALL_REDUCE, "errors").Flags(DDL_FLAG_RESUMES).Buffer(data.data(), data.data(), 1).Run(comm);
  EXPECT_EQ(outcome.code, DDL_OK) << outcome.message;
  EXPECT_EQ(data[0], static_cast<float>(ddl_size(comm) * (ddl_size(comm) - 1) / 2));
}

// `submits`: how many buckets the rank submits. `unplanned`: whether it submits the unplanned collective, too.
void FailingStep(ddl_comm* comm, uint64_t step, int rank, uint32_t submits, bool unplanned) {
  std::vector<std::unique_ptr<PlannedSum>> buckets;
  for (uint32_t i = 0; i < submits; ++i) {
    buckets.push_back(std::make_unique<PlannedSum>(1, step, i, rank, i % 2 == 0 ? 100 : 50000));
    if (i % 2 != 0 || buckets[i]->call.TryRun(comm, 100) == 0) buckets[i]->work = buckets[i]->call.Start(comm);
  }
  std::vector<float> data(10, 1);
  Call other(DDL_ALL_REDUCE, "other");
  other.Buffer(data.data(), data.data(), 10);
  ddl_work* const work = unplanned ? other.Start(comm) : nullptr;
  bool cancelled = submits < kBuckets;
  if (cancelled) {  // it fails while its submissions are still pending
    Call alarm(DDL_BARRIER, "failed");
    ddl_work* const alarmed = alarm.Flags(DDL_FLAG_CANCELS).Start(comm);
    for (auto& bucket : buckets) {
      if (bucket->work != nullptr) Call::Finish(bucket->work);
    }
    if (work != nullptr) Call::Finish(work);
    std::vector<float> ranks(1, static_cast<float>(rank));
    Call errors(DDL_ALL_REDUCE, "errors");
    ddl_work* const resumed = errors.Flags(DDL_FLAG_RESUMES).Buffer(ranks.data(), ranks.data(), 1).Start(comm);
    EXPECT_EQ(Call::Finish(alarmed).code, DDL_OK);
    EXPECT_EQ(Call::Finish(resumed).code, DDL_OK);
    return;
  }
  for (auto& bucket : buckets) {
    if (bucket->work == nullptr) continue;
    const Outcome outcome = Call::Finish(bucket->work);
    if (outcome.code == DDL_OK) continue;
    cancelled = true;
    EXPECT_EQ(outcome.code, DDL_CANCELLED) << outcome.message;
    EXPECT_NE(outcome.message.find("another rank has failed"), std::string::npos) << outcome.message;
  }
  if (work != nullptr) Call::Finish(work);
  EXPECT_TRUE(cancelled);
  ComeTogether(comm, rank);
}

TEST(CancelTest, AFailureAtAnyPointCancelsTheStepOnAllRanksAndTheyContinue) {
  for (const std::vector<int>& group : {std::vector<int>{0, 0}, {0, 0, 0}, {0, 0, 2}, {0, 1, 2}, {0, 0, 2, 2}}) {
    RunOptions options = WithLane();
    options.warn_after_s = 0;  // as in a job, ranks wait this long for a rank that has nothing to run
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          const int size = ddl_size(comm);
          Random random(7);
          uint64_t step = 1;
          RunStep(comm, 1, step++, rank);
          for (int round = 0; round < 12; ++round) {
            const int first = static_cast<int>(random.Below(static_cast<uint64_t>(size)));
            const int second = static_cast<int>(random.Below(static_cast<uint64_t>(size)));
            const auto submits = static_cast<uint32_t>(random.Below(kBuckets));
            const bool unplanned = random.Below(2) == 0;
            const double start = ddl::Now();
            const bool fails = rank == first || rank == second;
            FailingStep(comm, step++, rank, fails ? submits : kBuckets, unplanned || !fails);
            EXPECT_LT(ddl::Now() - start, kSanitized ? 10 : 1.5);
            const uint64_t fell_back = Count(comm).fell_back;
            for (int i = 0; i < 3; ++i) RunStep(comm, 1, step++, rank);
            // Planned again; on a busy machine a rank may be too late for one of them.
            EXPECT_LT(Count(comm).fell_back, fell_back + 3 * kBuckets);
          }
        },
        options);
  }
}

TEST(CancelTest, DecidedCollectivesRunAndLaterOnesAreCancelledUntilAllResume) {
  const ddl::RankLocations locations = Nowhere(2);
  ddl::Coordinator coordinator(locations, 0, 0);
  const auto announce = [&](int rank, const std::string& name, uint32_t flags = 0) {
    ddl::Announcement a = ddl_test::Bucket(name, 0);
    a.flags = flags;
    coordinator.Announce(rank, a, 0);
  };
  const auto take = [&] {
    std::string text;
    for (const auto& each : coordinator.TakeVerdicts()) {
      text += each.decision.name + (each.decision.code == DDL_OK ? " runs" : " fails") + " on";
      for (const int rank : each.ranks) text += " " + std::to_string(rank);
      text += "; ";
    }
    return text;
  };
  announce(0, "a");
  announce(1, "a");
  announce(0, "b");
  announce(0, "b");
  announce(1, "alarm", DDL_FLAG_CANCELS);
  EXPECT_EQ(take(), "a runs on 0 1; b fails on 0; b fails on 0; ");
  announce(0, "c");
  announce(0, "alarm", DDL_FLAG_CANCELS);
  announce(1, "resume", DDL_FLAG_RESUMES);
  announce(0, "d");
  announce(0, "resume", DDL_FLAG_RESUMES);
  EXPECT_EQ(take(), "c fails on 0; alarm runs on 0 1; d fails on 0; resume runs on 0 1; ");
  announce(1, "b");
  announce(0, "b");
  EXPECT_EQ(take(), "b runs on 0 1; ");
  coordinator.Tick(100);
  EXPECT_TRUE(coordinator.TakeWarnings().empty());
  EXPECT_FALSE(coordinator.HasTombstones(0));
}

}  // namespace
}  // namespace ddl_test
