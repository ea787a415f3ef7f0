// Closes a communicator that other threads are about to use.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ddl.h"
#include "shm/stale_shared_memory.h"
#include "thread_group.h"

namespace ddl_test {
namespace {

// Returns a communicator of one rank; NULL and `error` if it cannot be created.
ddl_comm* CreateAlone(std::string* error) {
  const int32_t leader = 0;
  ddl_options options{};
  options.abi_version = DDL_ABI_VERSION;
  options.group = &leader;
  char text[1024] = "";
  ddl_comm* const comm = ddl_create(nullptr, &options, text, sizeof text);
  *error = text;
  return comm;
}

// Does what a binding's kernel does: looks up the communicator, submits, releases it.
int SumThroughTheWorld(std::string* message) {
  ddl_comm* const comm = ddl_find(DDL_WORLD);
  if (comm == nullptr) return -1;
  float value = 1;
  Call call(DDL_ALL_REDUCE, "late");
  ddl_work* const work = call.Buffer(&value, &value, 1).Start(comm);
  ddl_release(comm);
  const Outcome outcome = Call::Finish(work);
  *message = outcome.message;
  return outcome.code;
}

TEST(ShutdownTest, OfTheWorldWhileThreadsUseIt) {
  std::string error;
  for (int round = 0; round < 50; ++round) {
    ddl_comm* const comm = CreateAlone(&error);
    ASSERT_NE(comm, nullptr) << error;
    ddl_publish(DDL_WORLD, comm);
    std::atomic<int> started{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&started] {
        for (bool first = true;; first = false) {
          std::string message;
          const int code = SumThroughTheWorld(&message);
          if (first) ++started;
          if (code == -1) return;
          if (code == DDL_OK) continue;
          EXPECT_EQ(code, DDL_NOT_FOUND) << message;
          EXPECT_NE(message.find("shut down"), std::string::npos) << message;
        }
      });
    }
    while (started < 3) std::this_thread::yield();
    ddl_publish(DDL_WORLD, nullptr);
    ddl_destroy(comm);
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(ShutdownTest, OfAHeldCommunicatorFailsLaterRequests) {
  std::string error;
  ddl_comm* const comm = CreateAlone(&error);
  ASSERT_NE(comm, nullptr) << error;
  ddl_publish(DDL_WORLD, comm);
  ddl_comm* const held = ddl_find(DDL_WORLD);
  ddl_publish(DDL_WORLD, nullptr);
  ddl_destroy(comm);
  EXPECT_EQ(ddl_find(DDL_WORLD), nullptr);
  float value = 1;
  Call call(DDL_ALL_REDUCE, "late");
  EXPECT_EQ(call.Buffer(&value, &value, 1).Run(held).code, DDL_NOT_FOUND);
  ddl_close(held);
  ddl_release(held);
}

// Rank 0 closes its communicator during a gather in which rank 1 stalls.
class CloseInTheMiddle : public testing::TestWithParam<bool> {};

TEST_P(CloseInTheMiddle, IsALossOnlyToTheOtherRanks) {
  const bool by_caller = GetParam();
  std::atomic<bool> inside{false}, ended{false};
  const auto wait_for = [](const std::atomic<bool>& flag) {
    while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  RunRanks(by_caller ? AllTogether(2) : AllApart(2), [&](ddl_comm* comm, int rank) {
    struct Result {
      std::function<void()> stand_still;
      char rows[2];
    } result{[] {}, {}};
    if (rank == 1) {
      result.stand_still = [&] {
        inside = true;
        wait_for(ended);
      };
    }
    const char mine = 'a';
    Call call(DDL_ALL_GATHER, "gather");
    call.Dtype(DDL_UINT8).Rows(1, 1).Buffer(&mine, nullptr, 1);
    call.request.user = &result;
    call.request.allocate = [](void* user, const uint64_t*, int) -> void* {
      static_cast<Result*>(user)->stand_still();
      return static_cast<Result*>(user)->rows;
    };
    const auto run = [&] { return by_caller && call.TryRun(comm, 10'000'000) != 0 ? Outcome() : call.Run(comm); };
    if (rank == 1) {
      (void)run();  // it may already have all of rank 0's data
      Call next(DDL_BARRIER, "next");
      const Outcome outcome = next.Run(comm);
      EXPECT_EQ(outcome.code, DDL_UNAVAILABLE) << outcome.message;
      EXPECT_EQ(outcome.message.find("rank 0 has left"), 0u) << outcome.message;
      return;
    }
    std::thread closer([&] {
      wait_for(inside);
      ddl_close(comm);
    });
    const Outcome outcome = run();
    ended = true;
    EXPECT_EQ(outcome.code, DDL_NOT_FOUND) << outcome.message;
    EXPECT_EQ(outcome.message.find("the communicator has been shut down"), 0u) << outcome.message;
    closer.join();
  });
}

INSTANTIATE_TEST_SUITE_P(Shutdown, CloseInTheMiddle, testing::Bool());

// Forks while threads of the parent almost always run `parent`: a lock that one of them holds stays
// locked in the child. `child` returns its exit status.
void ForkInTheMiddleOf(const std::function<void()>& parent, const std::function<int()>& child) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!stop) parent();
    });
  }
#if defined(__SANITIZE_ADDRESS__)
  constexpr int kForks = 20;  // each is slow
#else
  constexpr int kForks = 300;
#endif
  int status = 0;
  for (int i = 0; i < kForks && status == 0; ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(5);  // ends a child that hangs
      _exit(child());
    }
    waitpid(pid, &status, 0);
  }
  EXPECT_FALSE(WIFSIGNALED(status)) << "a child hung";
  EXPECT_EQ(status, 0);
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

class ForkTest : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "the thread sanitizer does not follow forks of several threads";
#endif
    std::string error;
    comm_ = CreateAlone(&error);
    ASSERT_NE(comm_, nullptr) << error;
    ddl_publish(DDL_WORLD, comm_);
  }
  void TearDown() override {
    if (comm_ == nullptr) return;
    ddl_publish(DDL_WORLD, nullptr);
    ddl_destroy(comm_);
  }
  ddl_comm* comm_ = nullptr;
};

TEST_F(ForkTest, AChildThatSubmitsIsAlwaysRefused) {
  const auto sum = [] {
    std::string message;
    EXPECT_EQ(SumThroughTheWorld(&message), DDL_OK) << message;
  };
  ForkInTheMiddleOf(sum, [this] {
    float value = 1;
    Call call(DDL_ALL_REDUCE, "in a child");
    if (call.Buffer(&value, &value, 1).TryRun(comm_, 100) != 0) return 1;
    std::string message;
    const int code = SumThroughTheWorld(&message);
    return code == DDL_NOT_FOUND && message.find("forked") != std::string::npos ? 0 : 2;
  });
}

TEST_F(ForkTest, AChildCanAlwaysLookUpCommunicators) {
  const auto find = [] { ddl_release(ddl_find(DDL_WORLD)); };
  ForkInTheMiddleOf(find, [this] { return ddl_find(DDL_WORLD) == comm_ ? 0 : 1; });
}

TEST(PublishTest, EveryCommunicatorIsFoundOnlyByItsOwnNumber) {
  std::string error;
  const int64_t ids[] = {DDL_WORLD, 7, int64_t{1} << 62};
  ddl_comm* comms[3] = {};
  for (int i = 0; i < 3; ++i) {
    comms[i] = CreateAlone(&error);
    ASSERT_NE(comms[i], nullptr) << error;
    EXPECT_EQ(ddl_find(ids[i]), nullptr);
    ddl_publish(ids[i], comms[i]);
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(ddl_find(ids[i]), comms[i]);
    ddl_publish(ids[i], nullptr);
    EXPECT_EQ(ddl_find(ids[i]), nullptr);
    ddl_destroy(comms[i]);
    ddl_release(comms[i]);
  }
}

TEST(StaleSharedMemoryTest, RemovesLeftoversOfDeadProcesses) {
  char pattern[] = "/tmp/keras_ddl_stale_XXXXXX";
  const std::string folder = mkdtemp(pattern);
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  waitpid(dead, nullptr, 0);
  const std::string digits = "-0123456789abcdef";
  const std::string of_dead = folder + "/keras_ddl-" + std::to_string(dead) + digits;
  const std::vector<std::string> kept = {
      folder + "/keras_ddl-" + std::to_string(getpid()) + digits,
      of_dead + "0",
      folder + "/keras_ddl-" + std::to_string(dead),
      folder + "/other-" + std::to_string(dead) + digits,
  };
  for (const std::string& path : kept) std::ofstream(path) << "x";
  std::ofstream(of_dead) << "x";
  ddl::RemoveStaleSharedMemory(folder, 60);
  EXPECT_EQ(access(of_dead.c_str(), F_OK), 0) << "too young to be removed";
  ddl::RemoveStaleSharedMemory(folder, 0);
  EXPECT_NE(access(of_dead.c_str(), F_OK), 0);
  for (const std::string& path : kept) {
    EXPECT_EQ(access(path.c_str(), F_OK), 0) << path;
    unlink(path.c_str());
  }
  rmdir(folder.c_str());
}

}  // namespace
}  // namespace ddl_test
