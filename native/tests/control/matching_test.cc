// The coordinator alone: its work grows linearly with the number of ranks, and repeated collectives get a short id.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "control/announced.h"
#include "control/coordinator.h"
#include "control/mailbox.h"

namespace ddl_test {
namespace {

using ddl::Announcement;
using ddl::Coordinator;
using ddl::Verdict;

// Returns the coordinator's work while `size` ranks run ten steps of four buckets, one of which fails, poll ten
// times a step, and leave.
uint64_t Work(int size) {
  const ddl::RankLocations locations = Nowhere(size);
  Coordinator coordinator(locations, 5, 30);
  double now = 0;
  for (uint64_t step = 1; step <= 10; ++step) {
    for (int bucket = 0; bucket < 4; ++bucket) {
      for (int rank = 0; rank < size; ++rank) {
        Announcement a = Bucket("step/" + std::to_string(bucket), step);
        if (step == 5 && bucket == 2 && rank == 1) a.count = 7;
        coordinator.Announce(rank, a, now);
        if (rank % (size / 4) == 1) coordinator.Tick(now += 0.02);
      }
    }
    for (const std::string& warning : coordinator.TakeWarnings()) ADD_FAILURE() << warning;
  }
  size_t failed = 0;
  for (const Verdict& verdict : coordinator.TakeVerdicts()) failed += verdict.decision.code == DDL_OK ? 0 : 1;
  EXPECT_EQ(failed, static_cast<size_t>(size) + 1);  // the bucket, and each rank's last request of the same step
  for (int rank = 0; rank < size; ++rank) coordinator.Leave(rank);
  return coordinator.ranks_looked_at();
}

TEST(MatchingTest, WorkIsLinearInTheNumberOfRanks) {
  const auto few = static_cast<double>(Work(256));
  const auto many = static_cast<double>(Work(4096));
  EXPECT_GT(few, 256.0 * 40);  // the counter works
  EXPECT_LT(many / few, 16 * 1.1);
}

TEST(MatchingTest, RanksInDifferentCollectivesAreFoundInLinearTime) {
  const int size = 4096;
  const ddl::RankLocations locations = Nowhere(size);
  Coordinator coordinator(locations, 0, 0);
  for (int rank = 0; rank < size; ++rank) {
    Announcement a = Bucket(rank % 2 == 0 ? "even" : "odd", 0);
    a.flags = DDL_FLAG_BLOCKING;
    coordinator.Announce(rank, a, 0);
  }
  const uint64_t before = coordinator.ranks_looked_at();
  coordinator.Tick(2);
  EXPECT_LT(coordinator.ranks_looked_at() - before, 20u * size);
  const std::vector<Verdict> verdicts = coordinator.TakeVerdicts();
  ASSERT_EQ(verdicts.size(), 2u);
  EXPECT_NE(verdicts[0].decision.message.find(
                "rank(s) 0, 2, 4, 6, 8, 10, 12, 14 and 2040 more in all_reduce 'even' (float32[1000]), rank(s) 1, "
                "3, 5, 7, 9, 11, 13, 15 and 2040 more in all_reduce 'odd' (float32[1000])"),
            std::string::npos)
      << verdicts[0].decision.message;
}

TEST(MatchingTest, RepeatedCollectivesGetAShortId) {
  const ddl::RankLocations locations = Nowhere(3);
  Coordinator coordinator(locations, 0, 0);
  const auto run = [&](const Announcement& a) {
    for (int rank = 0; rank < 3; ++rank) coordinator.Announce(rank, a, 0);
    std::vector<Verdict> verdicts = coordinator.TakeVerdicts();
    EXPECT_EQ(verdicts.size(), 1u);
    EXPECT_EQ(verdicts[0].decision.code, DDL_OK);
    return verdicts[0].decision;
  };
  const Announcement a = Bucket("again", 1);
  EXPECT_EQ(run(a).id, 0u);
  const ddl::Decision gives = run(a);
  EXPECT_TRUE(gives.gives_id);
  EXPECT_EQ(gives.id, 1u);
  EXPECT_EQ(run(Bucket("once", 1)).id, 0u);
  Announcement shorter = a;
  shorter.count = 10;  // the same name, another collective
  EXPECT_EQ(run(shorter).id, 0u);
  EXPECT_EQ(run(shorter).id, 2u);

  // Two ranks send the id; one that has not read the decision yet sends the full announcement.
  coordinator.AnnounceKnown(0, 1, 7, 0);
  coordinator.Announce(1, a, 0);
  coordinator.AnnounceKnown(2, 1, 9, 0);
  ddl::Decision known = coordinator.TakeVerdicts().at(0).decision;
  EXPECT_EQ(known.id, 1u);
  EXPECT_FALSE(known.gives_id);
  EXPECT_EQ(ddl::EncodeKnown(1, 7).size(), 13u);
  const std::string bytes = ddl::EncodeDecision(known);
  EXPECT_EQ(bytes.size(), 9u);
  EXPECT_EQ(ddl::DecodeDecision(bytes).id, 1u);

  // Differences are still reported.
  coordinator.AnnounceKnown(0, 1, 8, 0);
  coordinator.Announce(1, shorter, 0);
  coordinator.AnnounceKnown(2, 1, 10, 0);
  const ddl::Decision failed = coordinator.TakeVerdicts().at(0).decision;
  EXPECT_EQ(failed.code, DDL_FAILED_PRECONDITION);
  EXPECT_EQ(failed.id, 0u);
  EXPECT_NE(failed.message.find("number of elements: 1000 on rank(s) 0, 2, 10 on rank(s) 1"), std::string::npos)
      << failed.message;
}

TEST(MatchingTest, RowsOfThousandsOfRanksAreSentByIdToo) {
  const int size = 16384;
  const ddl::RankLocations locations = Nowhere(size);
  Coordinator coordinator(locations, 0, 0);
  Announcement a = Bucket("gathered", 0);
  a.kind = DDL_ALL_GATHER;
  a.rows = 3;
  ddl::Decision decision;
  for (int time = 0; time < 3; ++time) {
    for (int rank = 0; rank < size; ++rank) coordinator.Announce(rank, a, 0);
    decision = coordinator.TakeVerdicts().at(0).decision;
  }
  std::string bytes = ddl::EncodeDecision(decision);
  EXPECT_EQ(bytes.size(), 17u);  // equal on all ranks, like the rows of a step
  EXPECT_EQ(ddl::DecodeDecision(bytes).rows, std::vector<uint64_t>(static_cast<size_t>(size), 3));
  decision.rows[7] = 4;
  bytes = ddl::EncodeDecision(decision);
  EXPECT_GT(bytes.size(), ddl::kMailboxBytes);  // channel_test.cc sends it in pieces
  EXPECT_EQ(ddl::DecodeDecision(bytes).rows, decision.rows);
}

}  // namespace
}  // namespace ddl_test
