// The planned queue and its thread alone. The test handles requests that fall back.
#include "engine/planned_queue.h"

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/communication_thread.h"
#include "engine/endpoints.h"
#include "several_groups.h"

namespace ddl_test {
namespace {

constexpr uint32_t kSums = 4;

std::unique_ptr<OwnSum> Planned(uint64_t run, uint32_t index, size_t count) {
  auto sum = std::make_unique<OwnSum>("sum" + std::to_string(index), count);
  sum->request().place = {7, run, index, kSums};
  return sum;
}

class Rank {
 public:
  explicit Rank(ddl::Endpoint& endpoint)
      : fallback_(endpoint.memory()), queue_(endpoint, fallback_), thread_(endpoint, queue_) {
    EXPECT_TRUE(thread_.Start().ok());
  }
  ddl::PlannedQueue& queue() { return queue_; }
  std::vector<std::unique_ptr<ddl::Request>> WaitForFallbacks(size_t count) {
    std::vector<std::unique_ptr<ddl::Request>> all;
    for (int i = 0; i < 20'000 && all.size() < count; ++i) {
      std::vector<std::unique_ptr<ddl::Request>> some;
      ddl::Status failure;
      EXPECT_TRUE(fallback_.Take(&some, &failure));
      for (auto& request : some) all.push_back(std::move(request));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (size_t i = 0; i < all.size(); ++i) fallback_.CountEnded();
    return all;
  }

 private:
  ddl::Submissions fallback_;
  ddl::PlannedQueue queue_;
  ddl::CommunicationThread thread_;
};

// Runs a step, whose sums are submitted in reverse order.
void RunStep(Rank& rank, uint64_t run, int size) {
  std::deque<std::unique_ptr<OwnSum>> sums;
  for (uint32_t i = kSums; i-- > 0;) {
    sums.push_back(Planned(run, i, 1000));
    rank.queue().Submit(sums.back()->Take());
  }
  for (auto& sum : sums) {
    const Outcome outcome = sum->Wait();
    EXPECT_EQ(outcome.code, DDL_OK) << outcome.message;
    EXPECT_EQ(sum->data(), std::vector<float>(1000, static_cast<float>(size)));
  }
}

TEST(PlannedQueueTest, RunsAPlanWithoutAMessageToRankZero) {
  for (const std::vector<int>& group : Groups()) {
    Meeting all(group.size());
    RunEndpoints(group, [&](std::unique_ptr<ddl::Endpoint> endpoint, int) {
      Rank rank(*endpoint);
      for (uint64_t run = 1; run <= 10; ++run) RunStep(rank, run, endpoint->size());
      EXPECT_EQ(rank.queue().num_run(), 10u * kSums);
      EXPECT_EQ(rank.queue().num_fallbacks(), 0u);
      EXPECT_EQ(endpoint->channel().sent().messages, 0u);
      all.Wait();
    });
  }
}

TEST(PlannedQueueTest, AMismatchFallsBackOnAllRanksAndThePlanIsUsedAgain) {
  for (const std::vector<int>& group : Groups()) {
    Meeting all(group.size());
    RunEndpoints(group, [&](std::unique_ptr<ddl::Endpoint> endpoint, int number) {
      Rank rank(*endpoint);
      RunStep(rank, 1, endpoint->size());
      std::deque<std::unique_ptr<OwnSum>> sums;
      for (uint32_t i = 0; i < kSums; ++i) {
        sums.push_back(Planned(2, i, i == 1 && number == 1 ? 999 : 1000));
        rank.queue().Submit(sums.back()->Take());
      }
      EXPECT_EQ(sums[0]->Wait().code, DDL_OK);
      const auto fallen_back = rank.WaitForFallbacks(kSums - 1);
      EXPECT_EQ(fallen_back.size(), kSums - 1);
      for (uint32_t i = 1; i < kSums; ++i) EXPECT_FALSE(sums[i]->IsDone());
      EXPECT_EQ(rank.queue().num_fallbacks(), kSums - 1);
      EXPECT_FALSE(rank.queue().HasOutstanding());
      for (const auto& request : fallen_back) request->ticket.reset();  // as when the request has ended
      RunStep(rank, 3, endpoint->size());
      all.Wait();
    });
  }
}

std::mutex received_mutex;
std::map<void*, std::vector<uint64_t>> received;  // rows from each rank, by request

// Each rank sends `number + 1` rows to rank 0 and one to each other rank; by plan they tell each other how many. With
// splits that do not add up on one rank, all fall back.
TEST(PlannedQueueTest, SendsRowsToAllAndWrongSplitsFallBack) {
  Meeting all(3);
  RunEndpoints({0, 0, 2}, [&](std::unique_ptr<ddl::Endpoint> endpoint, int number) {
    Rank rank(*endpoint);
    for (uint64_t run = 1; run <= 2; ++run) {
      const auto rows = static_cast<uint64_t>(number + 3);
      OwnSum exchange("rows", rows * 2);
      ddl::Request& request = exchange.request();
      request.announcement.kind = DDL_ALL_TO_ALL;
      request.announcement.rows = rows;
      request.announcement.row_count = 2;
      request.announcement.splits = {number + 1, 1, run == 2 && number == 1 ? 2 : 1};
      request.buffers[0].out = nullptr;
      request.place = {9, run, 0, 1};
      request.allocate = [](void* user, const uint64_t* rows_by_rank, int count) -> void* {
        const std::lock_guard<std::mutex> lock(received_mutex);
        received[user].assign(rows_by_rank, rows_by_rank + count);
        static thread_local std::vector<float> memory(64);  // of the communication thread
        return memory.data();
      };
      rank.queue().Submit(exchange.Take());
      if (run == 1) {
        const Outcome outcome = exchange.Wait();
        EXPECT_EQ(outcome.code, DDL_OK) << outcome.message;
        const std::vector<uint64_t> expected =
            number == 0 ? std::vector<uint64_t>{1, 2, 3} : std::vector<uint64_t>{1, 1, 1};
        const std::lock_guard<std::mutex> lock(received_mutex);
        EXPECT_EQ(received[&exchange], expected);
        EXPECT_EQ(rank.queue().num_run(), 1u);
      } else {
        EXPECT_EQ(rank.WaitForFallbacks(1).size(), 1u);
      }
    }
    all.Wait();
  });
}

// Ranks of an all_gather may have different rows; planned, it runs only if their rows are equal.
TEST(PlannedQueueTest, EqualRowsAreGatheredAndOthersFallBack) {
  Meeting all(3);
  RunEndpoints({0, 0, 2}, [&](std::unique_ptr<ddl::Endpoint> endpoint, int number) {
    Rank rank(*endpoint);
    for (uint64_t run = 1; run <= 2; ++run) {
      const uint64_t rows = run == 2 && number == 1 ? 2 : 1;
      OwnSum gather("rows", rows * 3);
      ddl::Request& request = gather.request();
      request.announcement.kind = DDL_ALL_GATHER;
      request.announcement.rows = rows;
      request.announcement.row_count = 3;
      request.buffers[0].out = nullptr;
      request.place = {9, run, 0, 1};
      request.allocate = [](void*, const uint64_t*, int) -> void* {
        static thread_local std::vector<float> memory(64);  // belongs to the communication thread
        return memory.data();
      };
      rank.queue().Submit(gather.Take());
      if (run == 1) {
        EXPECT_EQ(gather.Wait().code, DDL_OK);
        EXPECT_EQ(rank.queue().num_run(), 1u);
      } else {
        EXPECT_EQ(rank.WaitForFallbacks(1).size(), 1u);
      }
    }
    all.Wait();
  });
}

}  // namespace
}  // namespace ddl_test
