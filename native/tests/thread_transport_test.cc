#include "thread_transport.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>

namespace ddl_test {
namespace {

void OnThreads(int size, const std::function<void(ddl_transport&)>& body) {
  std::vector<ddl_transport> transports = MakeThreadTransports(size);
  std::vector<std::thread> threads;
  for (ddl_transport& transport : transports) {
    threads.emplace_back([&transport, &body] { body(transport); });
  }
  for (std::thread& thread : threads) thread.join();
  for (ddl_transport& transport : transports) transport.destroy(transport.self);
}

int Wait(ddl_transport& transport, void** operation) {
  for (;;) {
    int finished = 0;
    const int code = transport.test(transport.self, operation, &finished);
    if (code != DDL_OK || finished) return code;
    std::this_thread::yield();
  }
}

TEST(ThreadTransportTest, AllGathers) {
  OnThreads(4, [](ddl_transport& t) {
    for (int round = 0; round < 20; ++round) {
      const int mine = 10 * round + t.rank;
      int all[4];
      ASSERT_EQ(t.all_gather(t.self, &mine, all, sizeof mine), DDL_OK);
      for (int r = 0; r < 4; ++r) ASSERT_EQ(all[r], 10 * round + r);
    }
  });
}

TEST(ThreadTransportTest, MessagesOfOneTagStayInOrderAtAnySize) {
  OnThreads(2, [](ddl_transport& t) {
    constexpr int kMessages = 50;
    std::vector<std::vector<char>> messages;
    std::vector<void*> operations(kMessages);
    for (int i = 0; i < kMessages; ++i) messages.emplace_back(i % 3 == 0 ? 3 * kEagerBytes : i, static_cast<char>(i));
    if (t.rank == 0) {
      for (int i = 0; i < kMessages; ++i) {
        t.isend(t.self, 1, i % 2, messages[i].data(), messages[i].size(), &operations[i]);
      }
      for (void*& operation : operations) ASSERT_EQ(Wait(t, &operation), DDL_OK);
    } else {
      std::vector<std::vector<char>> received;
      for (const auto& message : messages) received.emplace_back(message.size());
      for (const int parity : {1, 0}) {
        for (int i = parity; i < kMessages; i += 2) {
          t.irecv(t.self, 0, i % 2, received[i].data(), received[i].size(), &operations[i]);
        }
      }
      for (void*& operation : operations) ASSERT_EQ(Wait(t, &operation), DDL_OK);
      EXPECT_EQ(received, messages);
    }
  });
}

TEST(ThreadTransportTest, ProbeFindsTheOldestMessageOfATag) {
  OnThreads(3, [](ddl_transport& t) {
    char token = 0, all[3];
    void* operation = nullptr;
    int peer = 7;
    size_t bytes = 0;
    if (t.rank == 2) {
      ASSERT_EQ(t.isend(t.self, 0, 5, "third", 5, &operation), DDL_OK);
      ASSERT_EQ(Wait(t, &operation), DDL_OK);
    }
    t.all_gather(t.self, &token, all, 1);
    if (t.rank == 1) {
      ASSERT_EQ(t.isend(t.self, 0, 5, "two", 3, &operation), DDL_OK);
      ASSERT_EQ(Wait(t, &operation), DDL_OK);
    }
    t.all_gather(t.self, &token, all, 1);
    if (t.rank == 0) {
      char text[8];
      ASSERT_EQ(t.probe(t.self, 4, &peer, &bytes), DDL_OK);
      EXPECT_EQ(peer, -1);
      for (const int expected : {2, 1}) {
        ASSERT_EQ(t.probe(t.self, 5, &peer, &bytes), DDL_OK);
        ASSERT_EQ(peer, expected);
        ASSERT_EQ(t.irecv(t.self, peer, 5, text, bytes, &operation), DDL_OK);
        ASSERT_EQ(Wait(t, &operation), DDL_OK);
        EXPECT_EQ(std::string(text, bytes), expected == 2 ? "third" : "two");
      }
      ASSERT_EQ(t.probe(t.self, 5, &peer, &bytes), DDL_OK);
      EXPECT_EQ(peer, -1);
    }
  });
}

TEST(ThreadTransportTest, AMessageLargerThanItsBufferIsAnError) {
  OnThreads(2, [](ddl_transport& t) {
    void* operation = nullptr;
    char text[4] = "abc";
    if (t.rank == 0) {
      t.isend(t.self, 1, 0, text, 4, &operation);
      ASSERT_EQ(Wait(t, &operation), DDL_OK);
    } else {
      t.irecv(t.self, 0, 0, text, 2, &operation);
      EXPECT_EQ(Wait(t, &operation), DDL_INTERNAL);
      EXPECT_STREQ(t.last_error(t.self), "a message of 4 bytes came for a buffer of 2");
    }
  });
}

TEST(ThreadTransportTest, PlainAllReduceReducesInPlace) {
  OnThreads(3, [](ddl_transport& t) {
    std::vector<float> values(100, static_cast<float>(t.rank + 1));
    ASSERT_EQ(t.plain_all_reduce(t.self, values.data(), values.data(), 100, DDL_FLOAT32, DDL_SUM), DDL_OK);
    EXPECT_EQ(values, std::vector<float>(100, 6));
    std::vector<int8_t> bytes(5, static_cast<int8_t>(120 + t.rank));
    ASSERT_EQ(t.plain_all_reduce(t.self, bytes.data(), bytes.data(), 5, DDL_INT8, DDL_MEAN), DDL_OK);
    EXPECT_EQ(bytes, std::vector<int8_t>(5, 121));
    std::vector<int64_t> longs(5, t.rank);
    ASSERT_EQ(t.plain_all_reduce(t.self, longs.data(), longs.data(), 5, DDL_INT64, DDL_MEAN), DDL_OK);
    EXPECT_EQ(longs, std::vector<int64_t>(5, 1));
  });
}

TEST(ThreadTransportTest, SharesOneZeroedPageAlignedBlockPerLeader) {
  OnThreads(4, [](ddl_transport& t) {
    const int leader = t.rank / 2 * 2;
    char* const block = static_cast<char*>(t.share(t.self, leader, 10000));
    ASSERT_NE(block, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 4096, 0u);
    EXPECT_EQ(block[t.rank % 2], 0);
    block[t.rank % 2] = static_cast<char>(t.rank + 1);
    char token = 0, all[4];
    t.all_gather(t.self, &token, all, 1);
    EXPECT_EQ(block[0], leader + 1);
    EXPECT_EQ(block[1], leader + 2);
    EXPECT_EQ(t.share(t.self, leader, 20000), nullptr);
    EXPECT_NE(std::string(t.last_error(t.self)).find("20000"), std::string::npos);
  });
}

}  // namespace
}  // namespace ddl_test
