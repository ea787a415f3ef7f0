// Control messages whose peer stops halfway, or that are in progress when the communicator is closed.
#include "control/channel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/tags.h"
#include "base/waiter.h"
#include "net/owned_messages.h"
#include "thread_group.h"
#include "thread_transport.h"
#include "transport_spy.h"

namespace ddl_test {
namespace {

Outcome Sum(ddl_comm* comm, const std::string& name) {
  float value = 1;
  const Outcome outcome = Call(DDL_ALL_REDUCE, name).Buffer(&value, &value, 1).Run(comm);
  EXPECT_TRUE(outcome.code != DDL_OK || value == static_cast<float>(ddl_size(comm))) << value;
  return outcome;
}

// The coordinator's receive from rank 2 starts and stays unfinished, as one above the eager limit does when
// its sender is stopped.
TEST(ControlTest, AHalfReceivedAnnouncementIsMissedAtTheDeadlineAndReadLater) {
  auto spies = Spies(3);
  std::atomic<bool> stopped{true};
  spies[0]->withholds = [&](const Spy::Message& message) {
    return stopped && message.receives && message.peer == 2 && message.tag == ddl::kUpTag;
  };
  RunOptions options = Spied(spies);
  options.deadline_s = 2;
  RunRanks(
      AllApart(3),
      [&](ddl_comm* comm, int rank) {
        const Outcome first = Sum(comm, "first");
        if (rank == 0) {
          EXPECT_GT(spies[0]->withheld, 0);
          stopped = false;
        }
        EXPECT_EQ(first.code, DDL_DEADLINE_EXCEEDED) << first.message;
        EXPECT_NE(first.message.find("for rank(s) 2; rank(s) 0, 1 had arrived"), std::string::npos) << first.message;
        const Outcome second = Sum(comm, "second");
        EXPECT_EQ(second.code, DDL_OK) << rank << ": " << second.message;
      },
      options);
}

// Rank 2 receives only half of rank 0's message: the others must not wait for rank 0 forever, nor rank 2.
TEST(ControlTest, AHalfReceivedDecisionFailsOnEveryRank) {
  auto spies = Spies(3);
  spies[2]->withholds = [](const Spy::Message& message) { return message.receives && message.tag == ddl::kDownTag; };
  RunOptions options = Spied(spies);
  options.deadline_s = 0.5;
  RunRanks(
      AllApart(3),
      [&](ddl_comm* comm, int rank) {
        EXPECT_NE(Sum(comm, "first").code, DDL_OK) << rank;
        EXPECT_TRUE(rank != 2 || spies[2]->withheld > 0);
      },
      options);
}

TEST(ControlTest, NothingIsInProgressWhenTheTransportIsDestroyed) {
  for (const bool receives : {false, true}) {
    auto spies = Spies(3);
    std::atomic<bool> stopped{false};
    std::atomic<size_t> under_way{0};
    for (auto& spy : spies) {
      spy->under_way_at_end = &under_way;
      spy->withholds = [&stopped, receives](const Spy::Message& message) {
        return stopped && !CarriesData(message.tag) && message.receives == receives;
      };
    }
    const Spy& holder = *spies[receives ? 0 : 1];
    RunOptions options = Spied(spies);
    options.lost_after_s = 30;  // with heartbeats
    RunRanks(
        AllApart(3),
        [&](ddl_comm* comm, int rank) {
          EXPECT_EQ(Sum(comm, "together").code, DDL_OK);
          if (rank != 1) return;
          stopped = true;
          ddl_work_free(Call(DDL_BARRIER, "pending").Start(comm));
          const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
          while (holder.withheld == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        },
        options);
    EXPECT_GT(holder.withheld, 0) << receives;
    EXPECT_EQ(under_way, 0u) << receives;
  }
}

// A decision about an all-gather of thousands of ranks is longer than a mailbox.
TEST(ControlTest, AMessageLongerThanAMailboxArrivesCompleteAndInOrder) {
  std::string longest;
  for (size_t i = 0; longest.size() < 5 * ddl::kMailboxBytes; ++i) longest += std::to_string(i) + " ";
  const std::vector<std::string> messages = {"first", longest, "", longest.substr(7, ddl::kMailboxBytes - 4), "last"};
  std::vector<ddl_transport> transports = MakeThreadTransports(2);
  std::vector<std::vector<std::string>> arrived(2);
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ddl_transport& transport = transports[static_cast<size_t>(rank)];
      std::unique_ptr<ddl::GroupMemory> memory;
      EXPECT_TRUE(ddl::GroupMemory::Create(transport, {0, 0}, 4096, &memory).ok());
      ddl::ControlChannel channel(transport, *memory);
      for (const std::string& message : messages) channel.Send(1 - rank, message);
      const double start = ddl::Now();
      auto& mine = arrived[static_cast<size_t>(rank)];
      bool told = false;
      while (done < 2 && ddl::Now() - start < 20) {
        std::vector<ddl::ControlChannel::Received> received;
        EXPECT_TRUE(channel.Poll(&received).ok());
        for (auto& [peer, bytes] : received) {
          EXPECT_EQ(peer, 1 - rank);
          mine.push_back(std::move(bytes));
        }
        if (told || mine.size() < messages.size() || !channel.Flush()) continue;
        EXPECT_TRUE(channel.Idle());
        told = true;
        ++done;
      }
      channel.Cancel();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (ddl_transport& transport : transports) transport.destroy(transport.self);
  EXPECT_EQ(arrived[0] == messages, true) << arrived[0].size() << " messages";
  EXPECT_EQ(arrived[1] == messages, true) << arrived[1].size() << " messages";
}

TEST(OwnedMessagesTest, KeepsMemoryOfMessagesThatCannotBeCancelled) {
  static std::vector<char*> kept;  // reachable: not a leak
  ddl_transport transport{};
  transport.isend = [](void*, int, int, const void* buffer, size_t, void** operation) {
    kept.push_back(static_cast<char*>(const_cast<void*>(buffer)));
    *operation = kept.back();
    return static_cast<int>(DDL_OK);
  };
  static int tries = 0;
  transport.cancel = [](void*, void**) {
    ++tries;
    return static_cast<int>(DDL_DEADLINE_EXCEEDED);
  };
  {
    ddl::OwnedMessages messages(transport);
    ASSERT_TRUE(messages.Send(1, 101, "hello").ok());
    ASSERT_TRUE(messages.Send(1, 101, "").ok());
    messages.Cancel(ddl::Now() + ddl::OwnedMessages::kCancelSeconds);
    EXPECT_TRUE(messages.empty());
    EXPECT_EQ(tries, 1);
    ASSERT_TRUE(messages.Send(2, 101, "world").ok());
    messages.Cancel(ddl::Now());
    EXPECT_EQ(tries, 1);  // the time is up
  }
  ASSERT_EQ(kept.size(), 3u);
  EXPECT_EQ(std::string(kept[0], 5), "hello");  // the address sanitizer would report freed memory
  EXPECT_EQ(std::string(kept[2], 5), "world");
  for (char* const memory : kept) delete[] memory;
}

TEST(OwnedMessagesTest, KeepsThePeersOrderAndDelaysNoOtherPeer) {
  static bool first_has_come = false;
  static int arriving = 3;  // from ranks 1, 2, 1
  static char done[3];
  ddl_transport transport{};
  transport.probe = [](void*, int, int* peer, size_t* bytes) {
    *peer = arriving == 0 ? -1 : arriving == 2 ? 2 : 1;
    *bytes = 1;
    return static_cast<int>(DDL_OK);
  };
  transport.irecv = [](void*, int, int, void* buffer, size_t, void** operation) {
    *static_cast<char*>(buffer) = static_cast<char>('a' + 3 - arriving);
    *operation = &done[3 - arriving--];
    return static_cast<int>(DDL_OK);
  };
  transport.test = [](void*, void** operation, int* finished) {
    *finished = *operation != &done[0] || first_has_come ? 1 : 0;
    return static_cast<int>(DDL_OK);
  };
  ddl::OwnedMessages messages(transport);
  std::vector<ddl::OwnedMessages::Finished> finished;
  ASSERT_TRUE(messages.ReceiveArriving(101).ok());
  ASSERT_TRUE(messages.TakeFinished(&finished).ok());
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0].peer, 2);
  EXPECT_EQ(finished[0].bytes, "b");
  first_has_come = true;
  ASSERT_TRUE(messages.TakeFinished(&finished).ok());
  ASSERT_EQ(finished.size(), 3u);
  EXPECT_EQ(finished[1].bytes, "a");
  EXPECT_EQ(finished[2].bytes, "c");
  EXPECT_TRUE(messages.empty());
}

}  // namespace
}  // namespace ddl_test
