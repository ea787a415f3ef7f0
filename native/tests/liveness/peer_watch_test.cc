// Watches several processes of this machine at once.
#include "liveness/peer_watch.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {
int polls = 0;
}

// Replaces the C library's function, and counts the calls.
extern "C" int poll(pollfd* fds, nfds_t n, int timeout_ms) {
  ++polls;
  timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
  return static_cast<int>(syscall(SYS_ppoll, fds, n, timeout_ms < 0 ? nullptr : &timeout, nullptr, 0));
}

namespace ddl_test {
namespace {

constexpr int kOthers = 8;

// Rank 0 beside kOthers idle processes.
class PeerWatchTest : public testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < kOthers; ++i) {
      int ends[2];
      ASSERT_EQ(pipe(ends), 0);
      pids_.push_back(fork());
      if (pids_.back() == 0) {
        // The test needs only what this process sends the others.
        ddl::RankLocations ignored;
        ddl_transport teller = Alone();
        teller.self = &ends[1];
        teller.all_gather = [](void* self, const void* in, void*, size_t bytes) {
          return write(*static_cast<int*>(self), in, bytes) < 0 ? static_cast<int>(DDL_INTERNAL)
                                                                : static_cast<int>(DDL_OK);
        };
        (void)ddl::RankLocations::Exchange(teller, &ignored);
        for (;;) pause();
      }
      close(ends[1]);
      cards_.push_back(ends[0]);
    }
    ddl_transport transport = Alone();
    transport.size = 1 + kOthers;
    transport.self = this;
    transport.all_gather = [](void* self, const void* in, void* out, size_t bytes) {
      char* to = static_cast<char*>(out);
      std::memcpy(to, in, bytes);
      for (const int record : static_cast<PeerWatchTest*>(self)->cards_) {
        if (read(record, to += bytes, bytes) != static_cast<ssize_t>(bytes)) return static_cast<int>(DDL_INTERNAL);
      }
      return static_cast<int>(DDL_OK);
    };
    ASSERT_TRUE(ddl::RankLocations::Exchange(transport, &locations_).ok());
    ddl_transport alone = Alone();
    ASSERT_TRUE(ddl::GroupMemory::Create(alone, {0}, 4096, &memory_).ok());
    peer_watch_ = std::make_unique<ddl::PeerWatch>(*memory_, locations_, 0, [this](int rank) { return rank == left_; });
  }
  void TearDown() override {
    for (const pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    for (const int record : cards_) close(record);
  }
  static ddl_transport Alone() {
    ddl_transport transport{};
    transport.size = 1;
    transport.all_gather = [](void*, const void* in, void* out, size_t bytes) {
      std::memcpy(out, in, bytes);
      return static_cast<int>(DDL_OK);
    };
    return transport;
  }
  void Kill(int rank) {
    kill(pids_[static_cast<size_t>(rank - 1)], SIGKILL);
    waitid(P_PID, static_cast<id_t>(pids_[static_cast<size_t>(rank - 1)]), nullptr, WEXITED | WNOWAIT);
  }

  std::vector<pid_t> pids_;
  std::vector<int> cards_;
  int left_ = -1;
  ddl::RankLocations locations_;
  std::unique_ptr<ddl::GroupMemory> memory_;
  std::unique_ptr<ddl::PeerWatch> peer_watch_;
};

TEST_F(PeerWatchTest, ChecksAllWithOneCallAndNamesTheDeadOne) {
  for (int rank = 1; rank <= kOthers; ++rank) ASSERT_TRUE(locations_.at(rank).same_pid_namespace) << rank;
  polls = 0;
  EXPECT_TRUE(peer_watch_->Check().ok());
  EXPECT_EQ(polls, 1);
  // A process that has said goodbye is not missed, and is no longer checked.
  left_ = 3;
  Kill(3);
  EXPECT_TRUE(peer_watch_->Check().ok());
  left_ = -1;
  EXPECT_TRUE(peer_watch_->Check().ok());
  Kill(6);
  polls = 0;
  const ddl::Status status = peer_watch_->Check();
  EXPECT_EQ(polls, 1);
  EXPECT_EQ(status.code(), DDL_ABORTED);
  ASSERT_EQ(status.ranks().size(), 1u);
  EXPECT_EQ(status.ranks()[0].rank, 6);
  EXPECT_EQ(status.ranks()[0].role, DDL_RANK_DIED);
  EXPECT_EQ(status.message().find("rank 6 on host "), 0u) << status.message();
  EXPECT_NE(status.message().find(" died."), std::string::npos) << status.message();
}

}  // namespace
}  // namespace ddl_test
