// Ranks that read and write each other's memory: threads of this process, and processes of their own.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "group_memory.h"
#include "peer_memory.h"
#include "shm_collectives.h"
#include "thread_group.h"
#include "thread_transport.h"

namespace ddl_test {
namespace {

using ddl::GroupMemory;
using ddl::PeerMemory;
using ddl::ShmPipeline;
using ddl::Status;
using ddl::View;
using ddl::Waiter;

constexpr size_t kSlotBytes = 16 * 1024;

// Runs `body` on `size` threads that share memory and reach each other's.
void RunGroup(int size, const std::function<void(GroupMemory&, ShmPipeline&)>& body, bool wanted = true) {
  std::vector<ddl_transport> transports = MakeThreadTransports(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<GroupMemory> memory;
      ddl_transport& transport = transports[static_cast<size_t>(rank)];
      Status status = GroupMemory::Create(transport, AllTogether(size), kSlotBytes, &memory);
      if (status.ok()) status = PeerMemory::Probe(transport, wanted, *memory);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_EQ(memory->reachable(), wanted && size > 1);
      Waiter waiter([] { return Status(); }, 30, size);
      ShmPipeline pipeline(*memory, waiter);
      body(*memory, pipeline);
      // Nobody frees what another still looks at.
      char mine = 0;
      std::vector<char> all(static_cast<size_t>(size));
      transport.all_gather(transport.self, &mine, all.data(), 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (ddl_transport& transport : transports) transport.destroy(transport.self);
}

// Buffers of `count` floats, cut into pieces of `piece` floats with gaps between them.
struct Pieces {
  Pieces(uint64_t count, uint64_t piece, float fill) : view(sizeof(float)) {
    memory.assign(count + count / piece + 1, fill);
    for (uint64_t at = 0; at < count; at += piece) {
      view.Add(&memory[at + at / piece], std::min(piece, count - at));
    }
  }
  std::vector<float> memory;
  View view;
};

class AttachedTest : public testing::TestWithParam<int> {};

TEST_P(AttachedTest, ReducesAnyPiecesInPlaceAndOutOfPlace) {
  const int size = GetParam();
  RunGroup(size, [&](GroupMemory& memory, ShmPipeline& pipeline) {
    const int rank = memory.local_rank();
    // Pieces of 7 floats: more than a slot shows of the largest, and more than a system call takes of the one before.
    for (const uint64_t piece : {uint64_t{1} << 30, uint64_t{1000}, uint64_t{7}}) {
      for (const uint64_t count : {uint64_t{1}, uint64_t{15}, uint64_t{1009}, uint64_t{3000}, uint64_t{30011}}) {
        for (const bool in_place : {false, true}) {
          Pieces in(count, piece, 0);
          Pieces out(count, piece, -1);
          uint64_t i = 0;
          in.view.ForEach(0, count, [&](char* data, uint64_t, uint64_t n) {
            for (uint64_t k = 0; k < n; ++k, ++i) {
              reinterpret_cast<float*>(data)[k] = static_cast<float>(i % 97) + static_cast<float>(rank) * 1000;
            }
          });
          Pieces& result = in_place ? in : out;
          const Status status = ddl::AttachedAllReduce(pipeline, in.view, result.view, {DDL_FLOAT32, DDL_SUM, 1}, 8192);
          ASSERT_TRUE(status.ok()) << status.message();
          i = 0;
          result.view.ForEach(0, count, [&](char* data, uint64_t, uint64_t n) {
            for (uint64_t k = 0; k < n; ++k, ++i) {
              const auto expected = static_cast<float>(i % 97) * static_cast<float>(size) +
                                    static_cast<float>(size * (size - 1) / 2) * 1000;
              ASSERT_EQ(reinterpret_cast<float*>(data)[k], expected) << i << " of " << count;
            }
          });
          // The gaps are nobody's.
          for (uint64_t gap = piece; gap < out.memory.size(); gap += piece + 1) ASSERT_EQ(out.memory[gap], -1);
        }
      }
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Ranks, AttachedTest, testing::Values(2, 3, 4, 8));

TEST(PeerMemoryTest, IsNotTriedWhereItIsNotWanted) {
  RunGroup(
      2,
      [](GroupMemory&, ShmPipeline& pipeline) {
        for (const ddl::Scheme& scheme : ddl::CandidateSchemes(1 << 20, 2, kSlotBytes, false)) {
          EXPECT_NE(scheme.algorithm, ddl::Algorithm::kAttached);
        }
        EXPECT_NE(ddl::ProposeScheme(pipeline, 1 << 20).algorithm, ddl::Algorithm::kAttached);
      },
      false);
}

TEST(PeerMemoryTest, NobodyWritesIntoARankThatHasWithdrawn) {
  RunGroup(2, [](GroupMemory& memory, ShmPipeline& pipeline) {
    static int target = 0;
    int mine = 7;
    std::vector<iovec> local{{&mine, sizeof mine}};
    std::vector<iovec> remote{{&target, sizeof target}};
    if (memory.local_rank() == 0) pipeline.peers().Withdraw();
    const uint64_t step = pipeline.Reserve(1);
    pipeline.MarkReady(step);
    ASSERT_TRUE(pipeline.WaitReady(step).ok());
    if (memory.local_rank() == 0) return;
    const Status status = pipeline.peers().Write(0, local, remote);
    EXPECT_EQ(status.code(), DDL_ABORTED);
    EXPECT_EQ(target, 0);
    EXPECT_EQ(memory.own().writes_to.load(), 0u);
  });
}

TEST(PeerMemoryTest, WithdrawWaitsForAWriteThatIsUnderWay) {
  RunGroup(2, [](GroupMemory& memory, ShmPipeline& pipeline) {
    static std::atomic<bool> ended{false};
    const uint64_t step = pipeline.Reserve(1);
    if (memory.local_rank() == 1) memory.own().writes_to = 1;
    pipeline.MarkReady(step);
    ASSERT_TRUE(pipeline.WaitReady(step).ok());
    if (memory.local_rank() == 1) {
      usleep(20'000);
      ended = true;
      memory.own().writes_to = 0;
    } else {
      pipeline.peers().Withdraw();
      EXPECT_TRUE(ended);
    }
  });
}

// Another process, found dead or alive.
class ChildTest : public testing::Test {
 protected:
  void SetUp() override {
    shared_ =
        static_cast<std::atomic<int>*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(shared_, MAP_FAILED);
  }
  void TearDown() override { munmap(shared_, 4096); }

  std::atomic<int>* shared_ = nullptr;
};

TEST_F(ChildTest, IsReadAndWrittenWhileItLivesAndAnErrorAfterwards) {
  RunGroup(2, [this](GroupMemory& memory, ShmPipeline& pipeline) {
    if (memory.local_rank() == 1) return;
    static int value = 1;  // at the same address in the child
    const pid_t child = fork();
    if (child == 0) {
      value = 41;
      *shared_ = 1;
      while (*shared_ == 1) usleep(1000);
      _exit(value == 42 ? 0 : 1);
    }
    while (*shared_ == 0) usleep(1000);
    memory.block(1).pid = child;
    int read = 0;
    std::vector<iovec> local{{&read, sizeof read}};
    std::vector<iovec> remote{{&value, sizeof value}};
    const Status alive = pipeline.peers().Read(1, local, remote);
    ASSERT_TRUE(alive.ok()) << alive.message();
    EXPECT_EQ(read, 41);
    ++read;
    local = {{&read, sizeof read}};
    remote = {{&value, sizeof value}};
    EXPECT_TRUE(pipeline.peers().Write(1, local, remote).ok());
    *shared_ = 2;
    int exit_status = -1;
    waitpid(child, &exit_status, 0);
    EXPECT_EQ(exit_status, 0) << "the child did not see what was written";
    EXPECT_EQ(value, 1);
    local = {{&read, sizeof read}};
    remote = {{&value, sizeof value}};
    const Status dead = pipeline.peers().Read(1, local, remote);
    EXPECT_EQ(dead.code(), DDL_ABORTED);
    EXPECT_NE(dead.message().find("rank 1 died"), std::string::npos) << dead.message();
  });
}

TEST(PeerMemoryTest, ANonsenseAddressIsAnErrorThatNamesTheWayOut) {
  RunGroup(2, [](GroupMemory&, ShmPipeline& pipeline) {
    char byte = 0;
    std::vector<iovec> local{{&byte, 1}};
    std::vector<iovec> remote{{reinterpret_cast<void*>(8), 1}};
    const Status status = pipeline.peers().Read(1 - pipeline.rank(), local, remote);
    EXPECT_EQ(status.code(), DDL_INTERNAL);
    EXPECT_NE(status.message().find("KERAS_DDL_CMA=0"), std::string::npos) << status.message();
  });
}

}  // namespace
}  // namespace ddl_test
