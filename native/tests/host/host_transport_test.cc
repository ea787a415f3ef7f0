// The transport between processes of one host, or of several, here between threads. A test that ends a rank closes
// its sockets as the kernel would.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ddl_host.h"

namespace {

constexpr size_t kLarge = 300'000;  // several datagrams

class HostTransportTest : public ::testing::Test {
 protected:
  // Whether two ranks are on different hosts, connected by a socket pair.
  using AreApart = std::function<bool(int, int)>;

  HostTransportTest() {
    char name[] = "/tmp/host_transport_testXXXXXX";
    directory_ = mkdtemp(name);
  }
  ~HostTransportTest() override { std::filesystem::remove_all(directory_); }

  ddl_transport Open(int rank, int size, const std::string& key = "world") {
    ddl_transport transport = {};
    char error[512] = "";
    EXPECT_EQ(ddl_host_open(directory_.c_str(), key.c_str(), rank, size, &transport, error, sizeof error), DDL_OK)
        << error;
    return transport;
  }

  // The transports of all ranks.
  std::vector<ddl_transport> OpenAll(int size, const AreApart& are_apart) {
    std::vector<ddl_transport> all;
    for (int rank = 0; rank < size; ++rank) all.push_back(Open(rank, size));
    for (int a = 0; a < size; ++a) {
      for (int b = 0; b < a; ++b) {
        int ends[2];
        if (!are_apart(a, b)) continue;
        EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
        EXPECT_EQ(ddl_host_connect(&all[static_cast<size_t>(a)], b, ends[0]), DDL_OK);
        EXPECT_EQ(ddl_host_connect(&all[static_cast<size_t>(b)], a, ends[1]), DDL_OK);
        sockets_[{a, b}] = ends[0];
        sockets_[{b, a}] = ends[1];
      }
    }
    return all;
  }

  void OnThreads(
      int size, const std::function<void(ddl_transport&)>& body,
      const AreApart& are_apart = [](int, int) { return false; }) {
    std::vector<ddl_transport> all = OpenAll(size, are_apart);
    std::vector<std::thread> threads;
    for (ddl_transport& transport : all) {
      threads.emplace_back([size, &transport, &body] {
        char token = 0;
        std::vector<char> all(static_cast<size_t>(size));
        ASSERT_EQ(transport.all_gather(transport.self, &token, all.data(), 1), DDL_OK);
        body(transport);
        ASSERT_EQ(transport.all_gather(transport.self, &token, all.data(), 1), DDL_OK);
        transport.destroy(transport.self);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(std::filesystem::is_empty(directory_));
  }

  std::string directory_;
  std::map<std::pair<int, int>, int> sockets_;  // (rank, peer) -> socket
};

bool EachAlone(int, int) { return true; }
bool TwoByTwo(int a, int b) { return a / 2 != b / 2; }

int Wait(ddl_transport& t, void** operation) {
  for (;;) {
    int finished = 0;
    const int code = t.test(t.self, operation, &finished);
    if (code != DDL_OK || finished) return code;
    std::this_thread::yield();
  }
}

void Send(ddl_transport& t, int peer, int tag, const std::string& text) {
  void* operation = nullptr;
  ASSERT_EQ(t.isend(t.self, peer, tag, text.data(), text.size(), &operation), DDL_OK);
  ASSERT_EQ(Wait(t, &operation), DDL_OK);
}

std::string Receive(ddl_transport& t, int peer, int tag, size_t bytes) {
  std::string text(bytes, '?');
  void* operation = nullptr;
  EXPECT_EQ(t.irecv(t.self, peer, tag, text.data(), bytes, &operation), DDL_OK);
  EXPECT_EQ(Wait(t, &operation), DDL_OK);
  return text;
}

void GathersMoreThanADatagram(ddl_transport& t) {
  for (const size_t bytes : {size_t{0}, size_t{4}, kLarge}) {
    const std::string mine(bytes, static_cast<char>('a' + t.rank));
    std::string all(4 * bytes, '?');
    ASSERT_EQ(t.all_gather(t.self, mine.data(), all.data(), bytes), DDL_OK);
    for (size_t r = 0; r < 4; ++r) {
      ASSERT_EQ(all.substr(r * bytes, bytes), std::string(bytes, static_cast<char>('a' + r)));
    }
  }
}

void SendsManyOfAllSizes(ddl_transport& t) {
  constexpr size_t kMessages = 50;
  std::vector<std::string> messages;
  std::vector<void*> operations(kMessages);
  for (size_t i = 0; i < kMessages; ++i) messages.emplace_back(i % 3 == 0 ? kLarge : i, static_cast<char>(i));
  if (t.rank == 0) {
    for (size_t i = 0; i < kMessages; ++i) {
      ASSERT_EQ(t.isend(t.self, 1, static_cast<int>(i % 2), messages[i].data(), messages[i].size(), &operations[i]),
                DDL_OK);
    }
    for (void*& operation : operations) ASSERT_EQ(Wait(t, &operation), DDL_OK);
  } else {
    std::vector<std::string> received;
    for (const auto& message : messages) received.emplace_back(message.size(), '?');
    for (const size_t parity : {size_t{1}, size_t{0}}) {
      for (size_t i = parity; i < kMessages; i += 2) {
        t.irecv(t.self, 0, static_cast<int>(i % 2), received[i].data(), received[i].size(), &operations[i]);
      }
    }
    for (void*& operation : operations) ASSERT_EQ(Wait(t, &operation), DDL_OK);
    EXPECT_EQ(received, messages);
  }
}

void ProbesForAnyRankAndForOne(ddl_transport& t) {
  char token = 0, all[3];
  int peer = 7;
  size_t bytes = 0;
  if (t.rank == 2) Send(t, 0, 5, "third");
  t.all_gather(t.self, &token, all, 1);
  if (t.rank == 1) Send(t, 0, 5, "two");
  t.all_gather(t.self, &token, all, 1);
  if (t.rank == 0) {
    ASSERT_EQ(t.probe(t.self, 4, &peer, &bytes), DDL_OK);
    EXPECT_EQ(peer, -1);
    ASSERT_EQ(ddl_host_probe(&t, 1, 5, &peer, &bytes), DDL_OK);
    EXPECT_EQ(peer, 1);
    EXPECT_EQ(bytes, 3u);
    std::map<int, std::string> received;  // in any order, because they take different paths
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(t.probe(t.self, 5, &peer, &bytes), DDL_OK);
      ASSERT_GT(peer, 0);
      received[peer] = Receive(t, peer, 5, bytes);
    }
    EXPECT_EQ(received, (std::map<int, std::string>{{1, "two"}, {2, "third"}}));
    ASSERT_EQ(t.probe(t.self, 5, &peer, &bytes), DDL_OK);
    EXPECT_EQ(peer, -1);
  }
}

TEST_F(HostTransportTest, AllGathersMoreThanADatagram) { OnThreads(4, GathersMoreThanADatagram); }
TEST_F(HostTransportTest, AllGathersBetweenHosts) {
  OnThreads(4, GathersMoreThanADatagram, EachAlone);
  OnThreads(4, GathersMoreThanADatagram, TwoByTwo);
}
TEST_F(HostTransportTest, MessagesOfOneTagStayInOrderAtAnySize) { OnThreads(2, SendsManyOfAllSizes); }
TEST_F(HostTransportTest, MessagesStayInOrderBetweenHosts) { OnThreads(2, SendsManyOfAllSizes, EachAlone); }
TEST_F(HostTransportTest, ProbesForAnyRankAndForOne) { OnThreads(3, ProbesForAnyRankAndForOne); }
TEST_F(HostTransportTest, ProbesBetweenHosts) { OnThreads(3, ProbesForAnyRankAndForOne, TwoByTwo); }

TEST_F(HostTransportTest, AMessageLargerThanItsBufferIsAnErrorAndTheNextOneArrives) {
  OnThreads(2, [](ddl_transport& t) {
    if (t.rank == 0) {
      Send(t, 1, 0, std::string(kLarge, 'x'));
      Send(t, 1, 0, "next");
    } else {
      char text[2];
      void* operation = nullptr;
      t.irecv(t.self, 0, 0, text, 2, &operation);
      EXPECT_EQ(Wait(t, &operation), DDL_INTERNAL);
      EXPECT_STREQ(t.last_error(t.self), "rank 1: irecv, peer 0, 300000 bytes: the buffer has 2");
      EXPECT_EQ(Receive(t, 0, 0, 4), "next");
    }
  });
}

// Rank 1 receives nothing before rank 0 has cancelled, because it could receive as fast as rank 0 sends.
void CancelsReceivesAndSends(ddl_transport& t, std::atomic<bool>& sends_are_cancelled) {
  char token = 0, all[2];
  if (t.rank == 0) {
    std::string large(40 * kLarge, 'l');  // more than the receiver's socket holds
    std::string never = "never";
    void* first = nullptr;
    void* second = nullptr;
    EXPECT_EQ(t.isend(t.self, 1, 1, large.data(), large.size(), &first), DDL_OK);
    EXPECT_EQ(t.isend(t.self, 1, 1, never.data(), never.size(), &second), DDL_OK);
    EXPECT_EQ(t.cancel(t.self, &second), DDL_OK);
    EXPECT_EQ(t.cancel(t.self, &first), DDL_OK);  // being sent: the transport has a copy of the rest
    EXPECT_EQ(first, nullptr);
    sends_are_cancelled = true;
    std::fill(large.begin(), large.end(), 'w');
    Send(t, 1, 1, "next");
  } else {
    char text[8];
    void* operation = nullptr;
    while (!sends_are_cancelled) std::this_thread::yield();
    ASSERT_EQ(t.irecv(t.self, 0, 9, text, 8, &operation), DDL_OK);
    ASSERT_EQ(t.cancel(t.self, &operation), DDL_OK);
    EXPECT_EQ(operation, nullptr);
    EXPECT_EQ(Receive(t, 0, 1, 40 * kLarge), std::string(40 * kLarge, 'l'));
    EXPECT_EQ(Receive(t, 0, 1, 4), "next");
  }
  t.all_gather(t.self, &token, all, 1);
}

TEST_F(HostTransportTest, CancelledReceivesAndSendsLeaveTheRestInOrder) {
  std::atomic<bool> sends_are_cancelled{false};
  OnThreads(2, [&](ddl_transport& t) { CancelsReceivesAndSends(t, sends_are_cancelled); });
}
TEST_F(HostTransportTest, CancelledOperationsLeaveTheRestInOrderBetweenHosts) {
  std::atomic<bool> sends_are_cancelled{false};
  OnThreads(2, [&](ddl_transport& t) { CancelsReceivesAndSends(t, sends_are_cancelled); }, EachAlone);
}

template <typename T>
void ReducesTo(ddl_transport& t, ddl_dtype dtype, ddl_op op, std::vector<T> mine, T expected) {
  ASSERT_EQ(t.plain_all_reduce(t.self, mine.data(), mine.data(), mine.size(), dtype, op), DDL_OK);
  EXPECT_EQ(mine, std::vector<T>(mine.size(), expected));
}

TEST_F(HostTransportTest, PlainAllReduceReducesInPlace) {
  OnThreads(3, [](ddl_transport& t) {
    const auto rank = t.rank;
    ReducesTo<float>(t, DDL_FLOAT32, DDL_SUM, std::vector<float>(200'000, static_cast<float>(rank + 1)), 6);
    ReducesTo<double>(t, DDL_FLOAT64, DDL_MEAN, std::vector<double>(5, rank), 1);
    ReducesTo<double>(t, DDL_FLOAT64, DDL_MAX, std::vector<double>(5, rank), 2);
    ReducesTo<int8_t>(t, DDL_INT8, DDL_MEAN, std::vector<int8_t>(5, static_cast<int8_t>(120 + rank)), 121);
    ReducesTo<uint8_t>(t, DDL_UINT8, DDL_SUM, std::vector<uint8_t>(5, 100), 44);
    ReducesTo<int64_t>(t, DDL_INT64, DDL_PRODUCT, std::vector<int64_t>(5, rank + 1), 6);
    ReducesTo<uint16_t>(t, DDL_BFLOAT16, DDL_SUM, std::vector<uint16_t>(5, 0x3f80), 0x4040);  // 1 + 1 + 1
    float nothing = 0;
    EXPECT_EQ(t.plain_all_reduce(t.self, &nothing, &nothing, 0, DDL_FLOAT32, DDL_SUM), DDL_OK);
  });
}

TEST_F(HostTransportTest, WaitsInSlicesAndNamesWhoHasArrived) {
  ddl_transport first = Open(0, 3), last = Open(2, 3);
  char token = 'a', all[3], other[3], other_token = 'c';
  uint8_t arrived[3];
  EXPECT_EQ(ddl_host_all_gather(&first, &token, all, 1, 0, arrived), DDL_DEADLINE_EXCEEDED);
  EXPECT_EQ(ddl_host_all_gather(&last, &other_token, other, 1, 10, arrived), DDL_DEADLINE_EXCEEDED);
  EXPECT_EQ(ddl_host_all_gather(&first, &token, all, 1, 10, arrived), DDL_DEADLINE_EXCEEDED);
  EXPECT_EQ(arrived[0], 1);
  EXPECT_EQ(arrived[1], 0);
  EXPECT_EQ(arrived[2], 1);
  std::thread middle([this] {
    ddl_transport t = Open(1, 3);
    char mine = 'b', three[3];
    ASSERT_EQ(t.all_gather(t.self, &mine, three, 1), DDL_OK);
    EXPECT_EQ(std::string(three, 3), "abc");
    t.destroy(t.self);
  });
  std::thread end([&] { EXPECT_EQ(ddl_host_all_gather(&last, &other_token, other, 1, -1, nullptr), DDL_OK); });
  EXPECT_EQ(ddl_host_all_gather(&first, &token, all, 1, -1, nullptr), DDL_OK);
  EXPECT_EQ(std::string(all, 3), "abc");
  middle.join();
  end.join();
  first.destroy(first.self);
  last.destroy(last.self);
}

TEST_F(HostTransportTest, ARankThatHasEndedIsNamedAndItsMailCountsAsSent) {
  ddl_transport left = Open(0, 2);
  std::thread dying([this] {
    ddl_transport t = Open(1, 2);
    char token = 0, all[2];
    ASSERT_EQ(t.all_gather(t.self, &token, all, 1), DDL_OK);
    t.destroy(t.self);
  });
  char token = 0, all[2];
  ASSERT_EQ(left.all_gather(left.self, &token, all, 1), DDL_OK);
  dying.join();
  Send(left, 1, 3, std::string(kLarge, 'x'));
  EXPECT_EQ(left.all_gather(left.self, &token, all, 1), DDL_ABORTED);
  EXPECT_STREQ(left.last_error(left.self), "rank 0: rank 1 has left or died while all ranks exchanged data");
  EXPECT_EQ(left.lost_rank(left.self), 1);
  left.destroy(left.self);
}

TEST_F(HostTransportTest, ARankOfAnotherHostThatDiesIsNamedAtOnce) {
  std::vector<ddl_transport> all = OpenAll(3, TwoByTwo);
  ddl_transport& left = all[0];
  char text[8];
  void* waiting = nullptr;
  ASSERT_EQ(left.irecv(left.self, 2, 1, text, sizeof text, &waiting), DDL_OK);
  Send(all[2], 0, 7, "last");
  shutdown(sockets_[{2, 0}], SHUT_RDWR);  // as the kernel does
  EXPECT_EQ(Wait(left, &waiting), DDL_ABORTED);
  EXPECT_NE(std::string(left.last_error(left.self)).find("rank 0: rank 2 died:"), std::string::npos);
  EXPECT_EQ(left.lost_rank(left.self), 2);
  void* later = nullptr;
  ASSERT_EQ(left.irecv(left.self, 2, 1, text, sizeof text, &later), DDL_OK);
  EXPECT_EQ(Wait(left, &later), DDL_ABORTED);
  EXPECT_EQ(Receive(left, 2, 7, 4), "last");  // its last message still arrives
  Send(left, 2, 3, std::string(kLarge, 'x'));
  int peer = 0;
  size_t bytes = 0;
  EXPECT_EQ(left.probe(left.self, 5, &peer, &bytes), DDL_ABORTED);
  EXPECT_EQ(all[1].probe(all[1].self, 5, &peer, &bytes), DDL_OK);  // its own connection is intact
  Send(all[1], 0, 3, "still");
  EXPECT_EQ(Receive(left, 1, 3, 5), "still");
  for (ddl_transport& t : all) t.destroy(t.self);
}

TEST_F(HostTransportTest, ARankOfAnotherHostThatLeavesIsNotLost) {
  std::vector<ddl_transport> all = OpenAll(2, EachAlone);
  ddl_transport& left = all[0];
  constexpr size_t kHalf = 100'000;  // as much as the socket accepts at once
  Send(all[1], 0, 7, std::string(kHalf, 'l'));
  std::thread leaving([&all] { all[1].destroy(all[1].self); });
  EXPECT_EQ(Receive(left, 1, 7, kHalf), std::string(kHalf, 'l'));
  leaving.join();
  int peer = 0;
  size_t bytes = 0;
  for (int i = 0; i < 100; ++i) ASSERT_EQ(left.probe(left.self, 5, &peer, &bytes), DDL_OK);
  Send(left, 1, 3, std::string(kLarge, 'x'));
  char token = 0, both[2];
  EXPECT_EQ(left.all_gather(left.self, &token, both, 1), DDL_ABORTED);
  left.destroy(left.self);
}

TEST_F(HostTransportTest, AnInvalidDatagramEndsTheStream) {
  std::vector<ddl_transport> all = OpenAll(2, EachAlone);
  const std::string garbage(1000, 'g');
  ASSERT_EQ(write(sockets_[{1, 0}], garbage.data(), garbage.size()), static_cast<ssize_t>(garbage.size()));
  int peer = 0;
  size_t bytes = 0;
  int code = DDL_OK;
  for (int i = 0; i < 10 && code == DDL_OK; ++i) code = all[0].probe(all[0].self, 5, &peer, &bytes);
  EXPECT_EQ(code, DDL_ABORTED);
  for (ddl_transport& t : all) t.destroy(t.self);
}

TEST_F(HostTransportTest, RemainingRanksMeetAgain) {
  OnThreads(3, [this](ddl_transport& t) {
    if (t.rank == 1) return;  // takes no part
    ddl_transport two = Open(t.rank / 2, 2, "left");
    int mine = t.rank, both[2];
    ASSERT_EQ(two.all_gather(two.self, &mine, both, sizeof mine), DDL_OK);
    EXPECT_EQ(both[0], 0);
    EXPECT_EQ(both[1], 2);
    two.destroy(two.self);
  });
}

TEST_F(HostTransportTest, AnAbandonedGatherNoLongerTouchesItsMemory) {
  ddl_transport first = Open(0, 2);
  {
    std::vector<char> mine(kLarge), all(2 * kLarge);
    EXPECT_EQ(ddl_host_all_gather(&first, mine.data(), all.data(), kLarge, 0, nullptr), DDL_DEADLINE_EXCEEDED);
  }
  std::thread second([this] {
    ddl_transport t = Open(1, 2);
    std::vector<char> mine(kLarge), all(2 * kLarge);
    EXPECT_EQ(ddl_host_all_gather(&t, mine.data(), all.data(), kLarge, 50, nullptr), DDL_DEADLINE_EXCEEDED);
    t.destroy(t.self);
  });
  first.destroy(first.self);
  second.join();
}

TEST_F(HostTransportTest, RefusesADirectoryThatOthersMayEnter) {
  ASSERT_EQ(chmod(directory_.c_str(), 0755), 0);
  ddl_transport transport = {};
  char error[512] = "";
  EXPECT_EQ(ddl_host_open(directory_.c_str(), "world", 0, 2, &transport, error, sizeof error), DDL_FAILED_PRECONDITION);
  EXPECT_NE(std::string(error).find("mode 0755"), std::string::npos) << error;
  chmod(directory_.c_str(), 0700);
}

TEST_F(HostTransportTest, RefusesADuplicateRank) {
  ddl_transport transport = Open(0, 2), same = {};
  char error[512] = "";
  EXPECT_EQ(ddl_host_open(directory_.c_str(), "world", 0, 2, &same, error, sizeof error), DDL_INTERNAL);
  EXPECT_NE(std::string(error).find("Two processes may be the same rank"), std::string::npos) << error;
  transport.destroy(transport.self);
}

TEST_F(HostTransportTest, WorksInADirectoryWithALongName) {
  directory_ += "/" + std::string(200, 'd');
  ASSERT_EQ(mkdir(directory_.c_str(), 0700), 0);
  OnThreads(2, [](ddl_transport& t) {
    if (t.rank == 0) {
      Send(t, 1, 0, "hello");
    } else {
      EXPECT_EQ(Receive(t, 0, 0, 5), "hello");
    }
  });
  directory_ = std::filesystem::path(directory_).parent_path();
}

}  // namespace
