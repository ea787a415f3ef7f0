// Processes that share memory and end in different ways.
#include "shm/life_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

namespace ddl_test {
namespace {

using ddl::LifeLock;
using ddl::RankBlock;

class LifeLockTest : public testing::Test {
 protected:
  void SetUp() override {
    void* const memory = mmap(nullptr, sizeof(RankBlock), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    block_ = static_cast<RankBlock*>(memory);
    LifeLock::Prepare(*block_);
  }
  void TearDown() override { munmap(block_, sizeof(RankBlock)); }

  // A process whose thread holds the lock until the process is killed or `leaves`.
  pid_t Start(bool leaves) {
    const pid_t pid = fork();
    if (pid != 0) return pid;
    std::thread([this, leaves] {
      const LifeLock alive(*block_);
      if (!leaves) pause();
    }).join();
    _exit(0);
  }

  RankBlock* block_ = nullptr;
};

TEST_F(LifeLockTest, ARankThatHasNotBegunOrHasLeftIsNotDead) {
  EXPECT_FALSE(LifeLock::IsBroken(*block_));
  ASSERT_EQ(waitpid(Start(true), nullptr, 0) > 0, true);
  EXPECT_FALSE(LifeLock::IsBroken(*block_));
}

TEST_F(LifeLockTest, AStoppedRankIsAliveAndAKilledOneIsDeadToAll) {
  const pid_t pid = Start(false);
  while (block_->life_state == 0) usleep(1000);
  EXPECT_FALSE(LifeLock::IsBroken(*block_));
  kill(pid, SIGSTOP);
  int status = 0;
  waitpid(pid, &status, WUNTRACED);
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_FALSE(LifeLock::IsBroken(*block_));
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  for (int look = 0; look < 3; ++look) EXPECT_TRUE(LifeLock::IsBroken(*block_));
}

}  // namespace
}  // namespace ddl_test
