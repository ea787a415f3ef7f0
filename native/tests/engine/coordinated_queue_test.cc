// The coordinated queue and its thread alone: all requests go through rank 0, in one order on all ranks.
#include "engine/coordinated_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/communication_thread.h"
#include "engine/endpoints.h"
#include "several_groups.h"

namespace ddl_test {
namespace {

// Runs `body` with a queue served by a thread, and closes the queue when all ranks are done.
void RunQueues(const std::vector<int>& group,
               const std::function<void(ddl::Submissions&, ddl::CoordinatedQueue&, int rank)>& body) {
  RunEndpoints(group, [&](std::unique_ptr<ddl::Endpoint> endpoint, int rank) {
    ddl::CoordinatedQueue queue(*endpoint);
    ddl::CommunicationThread thread(*endpoint, queue);
    ASSERT_TRUE(thread.Start().ok());
    body(endpoint->submissions(), queue, rank);
    OwnSum last("last", 1);
    endpoint->submissions().Submit(last.Take());
    EXPECT_EQ(last.Wait().code, DDL_OK);
    thread.Close();
  });
}

TEST(CoordinatedQueueTest, RunsRequestsSubmittedInDifferentOrders) {
  for (const std::vector<int>& group : Groups()) {
    RunQueues(group, [&](ddl::Submissions& submissions, ddl::CoordinatedQueue& queue, int rank) {
      std::deque<OwnSum> sums;
      std::vector<size_t> order;
      for (size_t i = 0; i < 20; ++i) {
        sums.emplace_back("sum" + std::to_string(i), 100 * i);
        order.push_back(i);
      }
      std::rotate(order.begin(), order.begin() + rank * 3, order.end());
      for (const size_t i : order) submissions.Submit(sums[i].Take());
      for (OwnSum& sum : sums) {
        const Outcome outcome = sum.Wait();
        EXPECT_EQ(outcome.code, DDL_OK) << outcome.message;
        EXPECT_EQ(sum.data(), std::vector<float>(sum.data().size(), static_cast<float>(group.size())));
      }
      EXPECT_EQ(queue.num_decided(), 20u);
    });
  }
}

TEST(CoordinatedQueueTest, AMismatchFailsOnAllRanksAndTheOthersRun) {
  for (const std::vector<int>& group : Groups()) {
    RunQueues(group, [&](ddl::Submissions& submissions, ddl::CoordinatedQueue&, int rank) {
      OwnSum differs("differs", rank == 1 ? 5 : 4);
      submissions.Submit(differs.Take());
      const Outcome outcome = differs.Wait();
      EXPECT_EQ(outcome.code, DDL_FAILED_PRECONDITION);
      EXPECT_TRUE(Contains(outcome.message, "5 on rank(s) 1"));
    });
  }
}

TEST(CoordinatedQueueTest, ClosingFailsPendingRequestsOnAllRanks) {
  Meeting survivors(2);
  RunEndpoints({0, 0, 2}, [&](std::unique_ptr<ddl::Endpoint> endpoint, int rank) {
    ddl::CoordinatedQueue queue(*endpoint);
    ddl::CommunicationThread thread(*endpoint, queue);
    ASSERT_TRUE(thread.Start().ok());
    OwnSum sum("sum", 10);
    if (rank != 1) {
      endpoint->submissions().Submit(sum.Take());
      const Outcome outcome = sum.Wait();
      EXPECT_EQ(outcome.code, DDL_UNAVAILABLE) << outcome.message;
      EXPECT_TRUE(Contains(outcome.message, "rank 1 has left"));
      survivors.Wait();
    }
    thread.Close();
    thread.Close();
    OwnSum late("late", 1);
    endpoint->submissions().Submit(late.Take());
    EXPECT_EQ(late.Wait().code, DDL_NOT_FOUND);
  });
}

TEST(CoordinatedQueueTest, ClosingAfterADeathReportsTheDeathInsteadOfLeaving) {
  Meeting known(3), closed(3);
  RunEndpoints({0, 0, 0}, [&](std::unique_ptr<ddl::Endpoint> endpoint, int rank) {
    ddl::CoordinatedQueue queue(*endpoint);
    if (rank == 2) endpoint->PublishBroken({DDL_ABORTED, "rank 1 died"});  // as its lane does
    known.Wait();
    if (rank == 0) {  // before its communication thread has checked
      queue.Leave();
      EXPECT_EQ(endpoint->broken().code(), DDL_ABORTED) << endpoint->broken().message();
      EXPECT_TRUE(Contains(endpoint->broken().message(), "rank 1 died"));
    }
    closed.Wait();
  });
}

}  // namespace
}  // namespace ddl_test
