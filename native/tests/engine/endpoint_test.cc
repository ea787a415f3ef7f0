// Endpoints alone: all ranks run the same thing at the same time, and learn when one rank gives up or
// leaves.
#include "engine/endpoint.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/endpoints.h"
#include "several_groups.h"

namespace ddl_test {
namespace {

TEST(EndpointTest, RunsOnAllRanks) {
  for (const std::vector<int>& group : Groups()) {
    RunEndpoints(group, [](std::unique_ptr<ddl::Endpoint> endpoint, int) {
      for (const size_t count : {0u, 1u, 10'000u}) {
        OwnSum sum("sum", count);
        const ddl::Status status = endpoint->Run(sum.request(), {});
        EXPECT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(sum.data(), std::vector<float>(count, static_cast<float>(endpoint->size())));
      }
      EXPECT_TRUE(endpoint->broken().ok());
      endpoint->Drain();
    });
  }
}

// Polls as a communication thread does, until `ends`.
template <typename Ends>
void Watch(ddl::Endpoint& endpoint, Ends ends) {
  for (int i = 0; i < 10'000 && !ends(); ++i) {
    endpoint.TakeMessages([&](int peer, const std::string& bytes) {
      if (ddl::TypeOf(bytes) == ddl::MessageType::kLeave) endpoint.MarkLeft(peer);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(EndpointTest, OtherRanksLearnWhyOneBroke) {
  for (const std::vector<int>& group : Groups()) {
    std::atomic<int> learned{0};
    RunEndpoints(group, [&](std::unique_ptr<ddl::Endpoint> endpoint, int rank) {
      ddl::Endpoint::EnterCommunicationThread();
      int calls = 0;
      endpoint->OnBroken([&](const ddl::Status&) { ++calls; });
      if (rank == endpoint->size() - 1) {
        endpoint->Break({DDL_ABORTED, "enough"});
        endpoint->Break({DDL_ABORTED, "again"});
      } else {
        Watch(*endpoint, [&] {
          const ddl::Status health = endpoint->Health();
          if (!health.ok()) endpoint->Break(health);
          return !endpoint->broken().ok();
        });
      }
      EXPECT_EQ(endpoint->broken().code(), DDL_ABORTED);
      EXPECT_TRUE(Contains(endpoint->broken().message(), "enough"));
      EXPECT_EQ(calls, 1);
      ++learned;
      Watch(*endpoint, [&] { return learned == endpoint->size(); });  // no rank ends before all know
      endpoint->Drain();
    });
    EXPECT_EQ(learned, static_cast<int>(group.size()));
  }
}

// Other ranks read the reason without a lock as soon as it exists. If it were written again, the thread sanitizer would
// report it, because the relaxed flags order nothing.
TEST(EndpointTest, PublishesOnlyTheFirstReason) {
  std::atomic<bool> seen{false};
  std::atomic<bool> again{false};
  RunEndpoints({0, 0}, [&](std::unique_ptr<ddl::Endpoint> endpoint, int rank) {
    ddl::Endpoint::EnterCommunicationThread();
    const auto wait_for = [&](const std::atomic<bool>& flag) {
      Watch(*endpoint, [&] { return flag.load(std::memory_order_relaxed); });
    };
    if (rank == 1) {
      endpoint->PublishBroken({DDL_ABORTED, "the first reason"});
      wait_for(seen);
      endpoint->PublishBroken({DDL_ABORTED, "another reason"});
      again.store(true, std::memory_order_relaxed);
    } else {
      Watch(*endpoint, [&] { return !endpoint->Health().ok(); });
      EXPECT_EQ(endpoint->Health().message(), "the first reason");
      seen.store(true, std::memory_order_relaxed);
      wait_for(again);
      EXPECT_EQ(endpoint->Health().message(), "the first reason");
    }
    endpoint->Drain();
  });
}

TEST(EndpointTest, OtherRanksLearnThatOneLeft) {
  for (const std::vector<int>& group : {std::vector<int>{0, 0}, {0, 1}}) {
    std::atomic<bool> seen{false};
    RunEndpoints(group, [&](std::unique_ptr<ddl::Endpoint> endpoint, int rank) {
      ddl::Endpoint::EnterCommunicationThread();
      if (rank == 1) {
        endpoint->channel().Send(0, ddl::EncodeText(ddl::MessageType::kLeave, ""));
        endpoint->PublishLeft();
        Watch(*endpoint, [&] { return seen.load(); });
      } else {
        Watch(*endpoint, [&] { return endpoint->left(1); });
        EXPECT_TRUE(endpoint->left(1));
        EXPECT_TRUE(endpoint->Health().ok()) << endpoint->Health().message();
        seen = true;
      }
      endpoint->Drain();
    });
  }
}

TEST(EndpointTest, ACallingThreadWaitsWithItsOwnHealthCheck) {
  RunEndpoints({0}, [](std::unique_ptr<ddl::Endpoint> endpoint, int) {
    endpoint->OnCallingThread([] { return ddl::Status(DDL_ABORTED, "interrupted"); }, [] { return std::string(); });
    EXPECT_EQ(endpoint->Health().message(), "interrupted");
    std::thread([&] {
      ddl::Endpoint::EnterCommunicationThread();
      EXPECT_TRUE(endpoint->Health().ok());
    }).join();
  });
}

}  // namespace
}  // namespace ddl_test
