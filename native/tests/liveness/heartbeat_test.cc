// Groups that lose contact, and groups that only seem to.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "test_data.h"
#include "thread_group.h"

namespace ddl_test {
namespace {

using Clock = std::chrono::steady_clock;

// A link between the groups {0, 1} and {2, 3} that drops messages while it is down.
const std::vector<int> kGroup = {0, 0, 2, 2};
std::atomic<bool> link_down{false};
ddl_transport real;
char swallowed;

int Test(void* self, void** operation, int* finished) {
  *finished = 0;
  return *operation == &swallowed ? DDL_OK : real.test(self, operation, finished);
}
int Cancel(void* self, void** operation) {
  if (*operation != &swallowed) return real.cancel(self, operation);
  *operation = nullptr;
  return DDL_OK;
}
// The transport does not know which rank a `self` belongs to, so this records it.
void* selves[4];
int Isend(void* self, int peer, int tag, const void* buffer, size_t bytes, void** operation) {
  int rank = 0;
  while (selves[rank] != self) ++rank;
  if (link_down && kGroup[static_cast<size_t>(rank)] != kGroup[static_cast<size_t>(peer)]) {
    *operation = &swallowed;
    return DDL_OK;
  }
  return real.isend(self, peer, tag, buffer, bytes, operation);
}

std::atomic<bool> ends_late{false};

int SlowAllReduce(void* self, const void* in, void* out, uint64_t count, uint32_t dtype, uint32_t op) {
  // Longer than heartbeats may be missing.
  const auto wait = [self](bool waits) {
    if (waits && self != selves[0]) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  };
  wait(!ends_late);
  const int code = real.plain_all_reduce(self, in, out, count, dtype, op);
  wait(ends_late);
  return code;
}

RunOptions Linked() {
  link_down = false;
  RunOptions options;
  options.lost_after_s = 1.6;
  options.deadline_s = 60;
  options.tweak = [](ddl_transport& transport) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (transport.isend != Isend) real = transport;
    selves[transport.rank] = transport.self;
    transport.isend = Isend;
    transport.test = Test;
    transport.cancel = Cancel;
    transport.plain_all_reduce = SlowAllReduce;
  };
  return options;
}

Outcome Sum(ddl_comm* comm, const std::string& name, size_t count = 1) {
  std::vector<float> data(count, 1);
  Call call(DDL_ALL_REDUCE, name);
  const Outcome outcome = call.Buffer(data.data(), data.data(), count).Run(comm);
  if (outcome.code == DDL_OK && data[count - 1] != 4) return {DDL_INTERNAL, "a wrong sum"};
  return outcome;
}

TEST(HeartbeatTest, AnIdleGroupIsNotLost) {
  RunRanks(
      kGroup,
      [](ddl_comm* comm, int) {
        EXPECT_EQ(Sum(comm, "before").code, DDL_OK);
        std::this_thread::sleep_for(std::chrono::milliseconds(4000));
        const Outcome after = Sum(comm, "after");
        EXPECT_EQ(after.code, DDL_OK) << after.message;
      },
      Linked());
}

TEST(HeartbeatTest, AGroupThatLeftIsNotLost) {
  RunOptions options = Linked();
  options.leave_early = {2, 3};
  RunRanks(
      kGroup,
      [](ddl_comm* comm, int rank) {
        EXPECT_EQ(Sum(comm, "together").code, DDL_OK);
        if (rank >= 2) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(3000));
        const Outcome outcome = Sum(comm, "alone");
        EXPECT_EQ(outcome.code, DDL_UNAVAILABLE);
        EXPECT_NE(outcome.message.find("has left"), std::string::npos) << outcome.message;
      },
      options);
}

// The library's own all-reduce blocks the communication thread, and so its heartbeats: on all hosts, or on one
// while another host has its result and continues.
TEST(HeartbeatTest, ABaselineAllReduceIsNotALoss) {
  for (const bool late : {false, true}) {
    ends_late = late;
    RunRanks(
        kGroup,
        [](ddl_comm* comm, int) {
          float value = 1;
          Call call(DDL_ALL_REDUCE, "plain");
          call.Flags(DDL_FLAG_PLAIN_MPI).Buffer(&value, &value, 1);
          EXPECT_EQ(call.Run(comm).code, DDL_OK);
          const Outcome after = Sum(comm, "after", 1000);
          EXPECT_EQ(after.code, DDL_OK) << after.message;
        },
        Linked());
  }
}

void ExpectLost(const Outcome& outcome, int rank) {
  EXPECT_EQ(outcome.code, DDL_ABORTED) << rank << ": " << outcome.message;
  using Roles = std::map<int, uint32_t>;
  EXPECT_EQ(outcome.roles,
            rank < 2 ? Roles({{2, DDL_RANK_SILENT}, {3, DDL_RANK_SILENT}}) : Roles({{0, DDL_RANK_SILENT}}));
  EXPECT_NE(outcome.message.find("no sign of life from rank(s) " + std::string(rank < 2 ? "2, 3" : "0") + " on host "),
            std::string::npos)
      << rank << ": " << outcome.message;
}

TEST(HeartbeatTest, ABrokenLinkIsNamedOnEveryRank) {
  RunRanks(
      kGroup,
      [](ddl_comm* comm, int rank) {
        EXPECT_EQ(Sum(comm, "before").code, DDL_OK);
        std::this_thread::sleep_for(std::chrono::milliseconds(1200));
        const auto start = Clock::now();
        link_down = true;
        ExpectLost(Sum(comm, "waits"), rank);
        EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));  // the deadline is 60 s
        EXPECT_EQ(Sum(comm, "later").code, DDL_ABORTED);
      },
      Linked());
}

TEST(HeartbeatTest, ALinkThatBreaksDuringATransferIsNamedOnEveryRank) {
  RunRanks(
      kGroup,
      [](ddl_comm* comm, int rank) {
        EXPECT_EQ(Sum(comm, "before").code, DDL_OK);
        Outcome outcome;
        for (int i = 0; outcome.code == DDL_OK && i < 1000; ++i) {
          if (rank == 3 && i == 3) link_down = true;
          outcome = Sum(comm, "data", 1'000'000);
        }
        ExpectLost(outcome, rank);
      },
      Linked());
}

}  // namespace
}  // namespace ddl_test
