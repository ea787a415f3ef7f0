// Ranks that wait for one another in different collectives, tested on the coordinator alone: the deadlocked ones fail,
// and ranks that may still submit something never do.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "control/announced.h"
#include "control/coordinator.h"

namespace ddl_test {
namespace {

using ddl::Announcement;
using ddl::Coordinator;
using ddl::Position;
using ddl::Verdict;

// `size` ranks that answer with their positions when asked.
class Ranks {
 public:
  explicit Ranks(int size) : locations_(Nowhere(size)), coordinator_(locations_, 0, 0) {}

  void Submit(int rank, const std::string& name, uint64_t step = 1, uint32_t flags = 0) {
    Announcement a = Bucket(name, step);
    a.flags = flags;
    coordinator_.Announce(rank, a, now_);
    ++pending_[rank];
  }
  // Lets time pass; ranks in `idle` report that they have only waited since then.
  void Pass(double seconds, const std::set<int>& idle) {
    const double start = now_;
    while (now_ < start + seconds) {
      coordinator_.Tick(now_ += 0.02);
      for (int rank : coordinator_.TakePositionQueries()) {
        ++asked_;
        Position position;
        position.where = "train.py:7";
        position.idle_s = idle.count(rank) != 0 ? now_ - start : 0;
        position.pending = pending_[rank] + unseen_[rank];
        coordinator_.OnPositionReport(rank, position.Encode(), true);
      }
      for (const Verdict& verdict : coordinator_.TakeVerdicts()) {
        for (int rank : verdict.ranks) {
          --pending_[rank];
          failed_.insert(std::to_string(rank) + " " + verdict.decision.name);
        }
        EXPECT_EQ(verdict.decision.code, DDL_FAILED_PRECONDITION) << verdict.decision.message;
        message_ = verdict.decision.message;
      }
    }
  }
  // Announcements of this rank that never arrive.
  void Lose(int rank) { ++unseen_[rank]; }
  const std::set<std::string>& failed() const { return failed_; }
  const std::string& message() const { return message_; }
  int asked() const { return asked_; }
  Coordinator& coordinator() { return coordinator_; }
  void Forget() { failed_.clear(); }

 private:
  const ddl::RankLocations locations_;
  Coordinator coordinator_;
  double now_ = 0;
  std::map<int, uint64_t> pending_;
  std::map<int, uint64_t> unseen_;
  std::set<std::string> failed_;
  std::string message_;
  int asked_ = 0;
};

using Failed = std::set<std::string>;

TEST(DeadlockTest, IdleRanksInDifferentCollectivesFailInSeconds) {
  Ranks ranks(3);
  ranks.Submit(0, "a");
  ranks.Submit(1, "b");
  ranks.Submit(2, "a");
  ranks.Pass(9, {0, 1, 2});
  EXPECT_EQ(ranks.failed(), (Failed{"0 a", "1 b", "2 a"}));
  EXPECT_NE(ranks.message().find("rank(s) 0, 2 in all_reduce 'a' (float32[1000]), rank(s) 1 in all_reduce 'b'"),
            std::string::npos)
      << ranks.message();
  // The names are free again.
  ranks.Forget();
  for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, "a", 2);
  for (const Verdict& verdict : ranks.coordinator().TakeVerdicts()) EXPECT_EQ(verdict.decision.code, DDL_OK);
}

TEST(DeadlockTest, BlockedRankAndIdleRankFail) {
  Ranks ranks(2);
  ranks.Submit(0, "step/0");
  ranks.Submit(1, "object", 0, DDL_FLAG_BLOCKING);
  ranks.Pass(9, {0});
  EXPECT_EQ(ranks.failed(), (Failed{"0 step/0", "1 object"}));
}

TEST(DeadlockTest, BusyRankDoesNotFail) {
  for (const std::set<int>& idle : {std::set<int>{0, 2}, std::set<int>{1}, std::set<int>{}}) {
    Ranks ranks(3);
    ranks.Submit(0, "a");
    ranks.Submit(1, "b");
    ranks.Submit(2, "a");
    ranks.Pass(60, idle);
    EXPECT_EQ(ranks.failed(), Failed{});
  }
}

TEST(DeadlockTest, RanksThatWaitForALateRankDoNotFail) {
  // Rank 2 has submitted nothing. Whatever the others wait in, it may still submit.
  Ranks ranks(3);
  ranks.Submit(0, "a");
  ranks.Submit(0, "b");
  ranks.Submit(1, "a");
  ranks.Submit(1, "c");
  ranks.Pass(60, {0, 1});
  EXPECT_EQ(ranks.failed(), Failed{});
  EXPECT_EQ(ranks.asked(), 0);  // no rank is interrupted
}

TEST(DeadlockTest, RanksThatOneCollectiveMayHelpDoNotFail) {
  // Both also wait for rank 2 in "shared", and continue when it arrives.
  Ranks ranks(3);
  for (int rank = 0; rank < 2; ++rank) {
    ranks.Submit(rank, "shared");
    ranks.Submit(rank, rank == 0 ? "a" : "b");
  }
  ranks.Submit(2, "c");
  ranks.Pass(60, {0, 1});
  EXPECT_EQ(ranks.failed(), Failed{});
}

TEST(DeadlockTest, ThreeRanksFailIfEachPairSharesACollective) {
  Ranks ranks(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.Submit(rank, "pair " + std::to_string(rank));
    ranks.Submit(rank, "pair " + std::to_string((rank + 1) % 3));
  }
  ranks.Pass(9, {0, 1, 2});
  EXPECT_EQ(ranks.failed().size(), 6u);
}

TEST(DeadlockTest, RankWithAnAnnouncementInTransitDoesNotFail) {
  Ranks ranks(2);
  ranks.Submit(0, "a");
  ranks.Submit(1, "b");
  ranks.Lose(1);
  ranks.Pass(60, {0, 1});
  EXPECT_EQ(ranks.failed(), Failed{});
}

TEST(DeadlockTest, RankThatSubmitsMeanwhileDoesNotFail) {
  Ranks ranks(2);
  ranks.Submit(0, "a");
  ranks.Submit(1, "b");
  for (int i = 0; i < 20; ++i) {
    ranks.Pass(3, {0, 1});
    ranks.Submit(1, "more " + std::to_string(i));
  }
  EXPECT_EQ(ranks.failed(), Failed{});
}

TEST(DeadlockTest, LateRankGetsTheSameErrorOnce) {
  Ranks ranks(3);
  ranks.Submit(0, "a");
  ranks.Submit(1, "b");
  ranks.Pass(9, {0, 1});
  EXPECT_EQ(ranks.failed(), (Failed{"0 a", "1 b"}));
  ranks.Submit(2, "b");
  ranks.Pass(1, {});
  EXPECT_EQ(ranks.failed().count("2 b"), 1u);
  // It gets the error once, in whichever collective it enters.
  for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, "a", 2);
  for (const Verdict& verdict : ranks.coordinator().TakeVerdicts()) {
    EXPECT_EQ(verdict.decision.code, DDL_OK) << verdict.decision.message;
  }
}

TEST(DeadlockTest, PositionSurvivesSerialization) {
  Position position;
  position.where = "train.py:7 in step";
  position.idle_s = 4.5;
  position.pending = 3;
  const Position got = Position::Decode(position.Encode());
  EXPECT_EQ(got.where, position.where);
  EXPECT_NEAR(got.idle_s, 4.5, 0.01);
  EXPECT_EQ(got.pending, 3u);
  EXPECT_EQ(Position::Decode("train.py:7").idle_s, 0);
  EXPECT_EQ(Position::Decode("").where, "");
}

}  // namespace
}  // namespace ddl_test
