// Ranks that pass on what others announce, and are stopped, leave, or are late themselves.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "several_groups.h"
#include "thread_group.h"
#include "transport_spy.h"

namespace ddl_test {
namespace {

// Rank 0 hears from rank 2, that from rank 4, each of which leads a host.
const std::vector<int>& Chain() {
  static const std::vector<int> group = {0, 0, 2, 2, 4, 4};
  return group;
}

TEST(RelayedTest, ADecisionReachesTheRanksOfAHostThroughTheirFirst) {
  RunOptions options;
  options.control_fan_in = 1;
  std::atomic<uint64_t> at_rank_0{0};
  RunRanks(
      Chain(),
      [&](ddl_comm* comm, int rank) {
        for (int i = 0; i < 50; ++i) EXPECT_EQ(SumOfOne(comm, "sum").code, DDL_OK);
        ddl_counters counters{};
        ddl_count(comm, &counters);
        if (rank == 0) at_rank_0 = counters.control_received;
      },
      options);
  EXPECT_GE(at_rank_0, 100u);  // of rank 1 and of the rest
  EXPECT_LT(at_rank_0, 200u);  // 250 without those between; some may come alone on a busy machine
}

TEST(RelayedTest, OfTheRanksBehindOneThatIsLateOnlyItIsNamed) {
  for (const int late : {2, 3, 4}) {
    RunOptions options;
    options.control_fan_in = 1;
    options.deadline_s = 0.5;
    std::atomic<bool> has_come{false};
    RunRanks(
        Chain(),
        [&](ddl_comm* comm, int rank) {
          EXPECT_EQ(SumOfOne(comm, "together").code, DDL_OK);
          if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
          const Outcome outcome = SumOfOne(comm, "late");
          EXPECT_EQ(outcome.code, DDL_DEADLINE_EXCEEDED) << outcome.message;
          EXPECT_TRUE(Contains(outcome.message, "for rank(s) " + std::to_string(late) + "; rank(s)"));
          if (rank == late) has_come = true;
          while (!has_come) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          for (int i = 0; i < 3; ++i) EXPECT_EQ(SumOfOne(comm, "late").code, DDL_OK);
        },
        options);
  }
}

// What ranks send to rank 2 stays half received there, as if it were stopped: they are asked, answer themselves, and
// hear the error; when it goes on, nothing counts twice.
TEST(RelayedTest, OfTheRanksBehindOneThatIsStoppedOnlyItIsNamed) {
  auto spies = Spies(4);
  std::atomic<bool> stopped{false};
  spies[1]->withholds = [&](const Spy::Message& message) {
    return stopped && message.receives && !CarriesData(message.tag);
  };
  RunOptions options = Spied(spies);
  options.control_fan_in = 1;
  options.deadline_s = 1.5;
  std::atomic<int> failed{0};
  // A chain of hosts of one rank: rank 1 passes on what 2 says, 2 what 3 says.
  RunRanks(
      AllApart(4),
      [&](ddl_comm* comm, int rank) {
        EXPECT_EQ(SumOfOne(comm, "together").code, DDL_OK);
        if (rank == 1) {
          stopped = true;
          while (failed < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          stopped = false;
          const Outcome late = SumOfOne(comm, "stuck");
          EXPECT_EQ(late.code, DDL_DEADLINE_EXCEEDED) << late.message;
        } else {
          while (!stopped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          const Outcome outcome = SumOfOne(comm, "stuck");
          EXPECT_EQ(outcome.code, DDL_DEADLINE_EXCEEDED) << outcome.message;
          EXPECT_TRUE(Contains(outcome.message, "for rank(s) 1; rank(s) 0, 2, 3 had arrived"));
          ++failed;
        }
        for (int i = 0; i < 5; ++i) {
          const Outcome next = SumOfOne(comm, "stuck");
          EXPECT_EQ(next.code, DDL_OK) << rank << ": " << next.message;
        }
      },
      options);
}

TEST(RelayedTest, WithoutOneOnTheWayWhatWaitsFailsAndNamesIt) {
  for (const int leaver : {2, 4}) {
    RunOptions options;
    options.control_fan_in = 1;
    options.leave_early = {leaver};
    options.lost_after_s = 5;
    const auto start = std::chrono::steady_clock::now();
    RunRanks(
        Chain(),
        [&](ddl_comm* comm, int rank) {
          EXPECT_EQ(SumOfOne(comm, "together").code, DDL_OK);
          if (rank == leaver) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            return;
          }
          for (const char* name : {"pending", "later"}) {
            const Outcome outcome = SumOfOne(comm, name);
            EXPECT_EQ(outcome.code, DDL_UNAVAILABLE) << outcome.message;
            EXPECT_TRUE(Contains(outcome.message, "all_reduce '" + std::string(name) + "' cannot complete: rank " +
                                                      std::to_string(leaver) + " has left"));
          }
          int last = -1;
          const Outcome join = Call(DDL_JOIN, "").Buffer(nullptr, &last, 1).Run(comm);
          EXPECT_EQ(join.code, DDL_UNAVAILABLE);
          EXPECT_TRUE(Contains(join.message,
                               "join cannot complete: rank " + std::to_string(leaver) + " has left without joining"));
        },
        options);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  }
}

TEST(RelayedTest, ManyAtOnceFromSeveralThreads) {
  RunOptions options;
  options.control_fan_in = 1;
  RunRanks(
      Chain(),
      [](ddl_comm* comm, int rank) {
        std::vector<std::thread> threads;
        for (int thread = 0; thread < 4; ++thread) {
          threads.emplace_back([comm, rank, thread] {
            for (int i = 0; i < 40; ++i) {
              std::string name(1, static_cast<char>('a' + (thread + i + rank) % 4));
              name += std::to_string(i);
              EXPECT_EQ(SumOfOne(comm, name).code, DDL_OK);
            }
          });
        }
        for (std::thread& thread : threads) thread.join();
      },
      options);
}

}  // namespace
}  // namespace ddl_test
