// Ranks that are late or leave: the others get one clear error, and the remaining ranks can continue.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "several_groups.h"
#include "thread_group.h"

namespace ddl_test {
namespace {

// ---- missing ranks --------------------------------------------------------------------------------------------------

TEST(DeadlineTest, NamesTheMissingRanksAndTheNextCollectiveWorks) {
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    struct Warnings {
      std::mutex mutex;
      std::string text;
    } warnings;
    RunOptions options;
    options.warn_after_s = 0.1;
    options.deadline_s = 0.5;
    options.warn_user = &warnings;
    options.warn = [](void* user, const char* message) {
      auto& to = *static_cast<Warnings*>(user);
      const std::lock_guard<std::mutex> lock(to.mutex);
      to.text += message;
    };
    std::atomic<int> failed{0};
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          EXPECT_EQ(SumOfOne(comm, "in step").code, DDL_OK);
          if (rank != size - 1) {
            const Outcome outcome = SumOfOne(comm, "lonely");
            EXPECT_EQ(outcome.code, DDL_DEADLINE_EXCEEDED) << outcome.message;
            EXPECT_EQ(outcome.roles, (std::map<int, uint32_t>{{size - 1, DDL_RANK_NAMED}}));
            EXPECT_TRUE(Contains(outcome.message, "lonely"));
            EXPECT_TRUE(Contains(outcome.message, "rank(s) " + std::to_string(size - 1)));
            ++failed;
          }
          // The last rank is late, and gets the error whenever it arrives.
          if (rank == size - 1) {
            while (failed < size - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            const Outcome late = SumOfOne(comm, "lonely");
            EXPECT_EQ(late.code, DDL_DEADLINE_EXCEEDED) << late.message;
          }
        },
        options);
    const std::lock_guard<std::mutex> lock(warnings.mutex);
    EXPECT_TRUE(Contains(warnings.text, "lonely"));
    EXPECT_TRUE(Contains(warnings.text, "rank(s) " + std::to_string(size - 1)));
  }
}

TEST(BlockedTest, DifferentBlockingCollectivesFailLongBeforeTheDeadline) {
  for (const std::vector<int>& group : Groups()) {
    const auto start = std::chrono::steady_clock::now();
    RunRanks(group, [&](ddl_comm* comm, int rank) {
      float value = 1;
      Call call(DDL_ALL_REDUCE, rank == 1 ? "b" : "a");
      const Outcome outcome = call.Flags(DDL_FLAG_BLOCKING).Buffer(&value, &value, 1).Run(comm);
      EXPECT_EQ(outcome.code, DDL_FAILED_PRECONDITION) << outcome.message;
      EXPECT_TRUE(Contains(outcome.message, "'a'"));
      EXPECT_TRUE(Contains(outcome.message, "'b'"));
      // The names are free again, also for the rank that waited in the other collective.
      for (const char* name : {"next", "a", "b"}) {
        const Outcome next = SumOfOne(comm, name);
        EXPECT_EQ(next.code, DDL_OK) << name << ": " << next.message;
      }
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
  }
}

// ---- ranks that leave -----------------------------------------------------------------------------------------------

TEST(LeaveTest, FailsPendingAndLaterRequests) {
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    for (const int leaver : {size - 1, 0}) {
      RunOptions options;
      options.leave_early = {leaver};
      const auto start = std::chrono::steady_clock::now();
      RunRanks(
          group,
          [&](ddl_comm* comm, int rank) {
            EXPECT_EQ(SumOfOne(comm, "together").code, DDL_OK);
            if (rank == leaver) {
              std::this_thread::sleep_for(std::chrono::milliseconds(50));
              return;
            }
            for (const char* name : {"pending", "later"}) {
              const Outcome outcome = SumOfOne(comm, name);
              EXPECT_EQ(outcome.code, DDL_UNAVAILABLE) << outcome.message;
              EXPECT_EQ(outcome.name, name);
              EXPECT_EQ(outcome.roles, (std::map<int, uint32_t>{{leaver, DDL_RANK_LEFT}}));
              EXPECT_TRUE(Contains(outcome.message, "rank " + std::to_string(leaver)));
              EXPECT_TRUE(Contains(outcome.message, "all_reduce '" + std::string(name) + "'")) << outcome.message;
            }
          },
          options);
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    }
  }
}

std::atomic<bool> leaver_is_gone{false};
void (*destroy_transport)(void* self) = nullptr;

void DestroyAndNote(void* self) {
  destroy_transport(self);
  leaver_is_gone = true;
}

// The leaver's own request is complete on its side, so the others must not wait in the middle of it.
TEST(LeaveTest, FailsARequestThatTheLeaverHasCompleted) {
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    for (const int leaver : {size - 1, 0}) {
      RunOptions options;
      options.leave_early = {leaver};
      options.deadline_s = 20;
      leaver_is_gone = false;
      options.tweak = [leaver](ddl_transport& transport) {
        if (transport.rank != leaver) return;
        destroy_transport = transport.destroy;
        transport.destroy = DestroyAndNote;
      };
      const auto start = std::chrono::steady_clock::now();
      RunRanks(
          group,
          [&](ddl_comm* comm, int rank) {
            std::vector<float> data(200'000, 1);
            Call call(DDL_ALL_REDUCE, "abandoned");
            call.Buffer(data.data(), data.data(), data.size());
            if (rank == leaver) {
              ddl_work* const work = call.Start(comm);
              std::this_thread::sleep_for(std::chrono::milliseconds(20));
              // Destroying fails it, so that its buffers are free from then on. (The thread that destroys the
              // communicator is this one, after this body: leak the buffers until the end of the process.)
              static std::vector<std::vector<float>> kept;
              static std::mutex mutex;
              const std::lock_guard<std::mutex> lock(mutex);
              kept.push_back(std::move(data));
              ddl_work_free(work);
              return;
            }
            while (!leaver_is_gone) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            const Outcome outcome = call.Run(comm);
            EXPECT_EQ(outcome.code, DDL_UNAVAILABLE) << outcome.message;
          },
          options);
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    }
  }
}

TEST(LeaveTest, FailsWhileAThirdRankIsLate) {
  // Ranks 0 and 1 wait for rank 2, which is late, and for rank 3, which has left, so waiting for rank 2 is useless.
  RunOptions options;
  options.leave_early = {3};
  std::atomic<int> failed{0};
  RunRanks(
      {0, 0, 2, 2},
      [&](ddl_comm* comm, int rank) {
        EXPECT_EQ(SumOfOne(comm, "together").code, DDL_OK);
        if (rank == 3) return;
        while (rank == 2 && failed < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(SumOfOne(comm, "pending").code, DDL_UNAVAILABLE);
        ++failed;
      },
      options);
}

TEST(LeaveTest, WithoutMemoryForAnAllGatherNoRankHangs) {
  RunRanks({0, 0, 2}, [&](ddl_comm* comm, int rank) {
    struct Answer {
      std::mutex mutex;
      int code = -1;
    } answer;
    float value = 1;
    const ddl_buffer buffer{&value, nullptr, 1, {}};
    ddl_request request{};
    request.kind = DDL_ALL_GATHER;
    request.num_buffers = 1;
    request.buffers = &buffer;
    request.rows = request.row_count = 1;
    request.name = "rows";
    std::vector<float> memory(3);
    void* users[2] = {rank == 1 ? nullptr : memory.data(), &answer};
    request.user = users;
    request.allocate = [](void* user, const uint64_t*, int) { return static_cast<void**>(user)[0]; };
    request.done = [](void* user, const ddl_failure* failure) {
      auto& to = *static_cast<Answer*>(static_cast<void**>(user)[1]);
      const std::lock_guard<std::mutex> lock(to.mutex);
      to.code = OutcomeOf(failure).code;
    };
    ddl_submit(comm, &request);
    for (int i = 0; i < 2000; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const std::lock_guard<std::mutex> lock(answer.mutex);
      if (answer.code != -1) break;
    }
    const std::lock_guard<std::mutex> lock(answer.mutex);
    EXPECT_TRUE(answer.code == DDL_INTERNAL || answer.code == DDL_ABORTED || (rank != 1 && answer.code == DDL_OK))
        << answer.code;
  });
}

}  // namespace
}  // namespace ddl_test
