// Ranks that read and write each other's memory: threads of this process, and child processes.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "shm/cma_step.h"
#include "shm/collectives.h"
#include "shm/peer_group.h"
#include "shm/tuned.h"

namespace ddl_test {
namespace {

class CmaAllReduceTest : public testing::TestWithParam<int> {};

TEST_P(CmaAllReduceTest, ReducesAnyPiecesInPlaceAndOutOfPlace) {
  const int size = GetParam();
  RunGroup(size, [&](GroupMemory& memory, ShmPipeline& pipeline) {
    const int rank = memory.local_rank();
    // The ranks' buffers are split differently. For the largest, pieces of 7 floats are more than a slot can list.
    for (const uint64_t piece : {uint64_t{1} << 30, uint64_t{1000}, uint64_t{7}}) {
      for (const uint64_t count : {uint64_t{1}, uint64_t{15}, uint64_t{1009}, uint64_t{3000}, uint64_t{30011}}) {
        for (const bool in_place : {false, true}) {
          Pieces in(count, piece + static_cast<uint64_t>(rank));
          Pieces out(count, piece + static_cast<uint64_t>(rank));
          uint64_t i = 0;
          in.view.ForEach(0, count, [&](char* data, uint64_t, uint64_t n) {
            for (uint64_t k = 0; k < n; ++k, ++i) {
              reinterpret_cast<float*>(data)[k] = static_cast<float>(i % 97) + static_cast<float>(rank) * 1000;
            }
          });
          Pieces& result = in_place ? in : out;
          const Status status = ddl::CmaAllReduce(pipeline, in.view, result.view, {DDL_FLOAT32, DDL_SUM, 1}, 8192);
          ASSERT_TRUE(status.ok()) << status.message();
          i = 0;
          result.view.ForEach(0, count, [&](char* data, uint64_t, uint64_t n) {
            for (uint64_t k = 0; k < n; ++k, ++i) {
              const auto expected = static_cast<float>(i % 97) * static_cast<float>(size) +
                                    static_cast<float>(size * (size - 1) / 2) * 1000;
              ASSERT_EQ(reinterpret_cast<float*>(data)[k], expected) << i << " of " << count;
            }
          });
          in.ExpectGaps();
          out.ExpectGaps();
        }
      }
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Ranks, CmaAllReduceTest, testing::Values(2, 3, 4, 8));

TEST(PeerMemoryTest, IsNotTriedIfSwitchedOff) {
  for (const bool wanted : {true, false}) {
    RunGroup(
        2,
        [wanted](GroupMemory&, ShmPipeline& pipeline) {
          for (const ddl_kind kind : {DDL_ALL_REDUCE, DDL_REDUCE_SCATTER, DDL_ALL_GATHER}) {
            bool tried = false;
            for (int i = 0; i < 200; ++i) {
              const ddl::Scheme scheme = ddl::ProposeScheme(pipeline, kind, 1 << 20);
              tried = tried || scheme.algorithm == ddl::Algorithm::kCma;
              pipeline.tuner().Report(kind, scheme, 1 << 20, 1e-4);
            }
            EXPECT_EQ(tried, wanted) << kind;
          }
        },
        wanted);
  }
}

// Lists that are split differently, and longer than one system call accepts.
TEST(PeerMemoryTest, MovesAnyListsOfPieces) {
  RunGroup(2, [](GroupMemory&, ShmPipeline& pipeline) {
    constexpr size_t kBytes = 9000;
    std::vector<char> here(2 * kBytes, 0);
    std::vector<char> there(2 * kBytes, 0);
    const auto cut = [](std::vector<char>& memory, size_t piece) {
      std::vector<iovec> list;
      for (size_t at = 0; at < kBytes; at += piece) list.push_back({&memory[2 * at], piece});
      return list;
    };
    for (const bool write : {false, true}) {
      for (size_t i = 0; i < kBytes; ++i)
        (write ? here : there)[i / (write ? 2 : 3) * (write ? 4 : 6) + i % (write ? 2 : 3)] =
            static_cast<char>(i % 113);
      std::vector<iovec> local = cut(here, 2);
      std::vector<iovec> remote = cut(there, 3);
      const Status status = write ? pipeline.peers().Write(1 - pipeline.rank(), local, remote)
                                  : pipeline.peers().Read(1 - pipeline.rank(), local, remote);
      ASSERT_TRUE(status.ok()) << status.message();
      for (size_t i = 0; i < kBytes; ++i) {
        ASSERT_EQ(here[i / 2 * 4 + i % 2], static_cast<char>(i % 113)) << i;
        ASSERT_EQ(there[i / 3 * 6 + i % 3], static_cast<char>(i % 113)) << i;
        ASSERT_EQ(here[i / 2 * 4 + 2], 0);
      }
      std::fill((write ? here : there).begin(), (write ? here : there).end(), 0);
    }
  });
}

TEST(PeerMemoryTest, StopsAtTheEndOfMemory) {
  RunGroup(2, [](GroupMemory&, ShmPipeline& pipeline) {
    char* const pages =
        static_cast<char*>(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(pages, MAP_FAILED);
    munmap(pages + 4096, 4096);
    std::vector<char> to(8192);
    std::vector<iovec> local{{to.data(), to.size()}};
    std::vector<iovec> remote{{pages, 8192}};
    EXPECT_EQ(pipeline.peers().Read(1 - pipeline.rank(), local, remote).code(), DDL_INTERNAL);
    std::vector<iovec> bytes{{pages, 1}, {pages + 4096, 1}};
    EXPECT_FALSE(PeerMemory::Accessible(bytes));
    bytes = {{pages, 1}};
    EXPECT_TRUE(PeerMemory::Accessible(bytes));
    munmap(pages, 4096);
  });
}

TEST(PeerMemoryTest, ARankThatGivesUpIsNoLongerWrittenTo) {
  if (!SystemHasTheCalls()) GTEST_SKIP() << "this system has no process_vm_readv";
  std::vector<ddl_transport> transports = MakeThreadTransports(2);
  std::vector<float> in[2];
  std::vector<float> out[2];
  for (int rank = 0; rank < 2; ++rank) {
    in[rank].assign(1 << 20, 1);
    out[rank].assign(1 << 20, 0);
  }
  std::atomic<bool> gave_up{false};
  size_t written_before = 0;
  Status statuses[2];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<GroupMemory> memory;
      ddl_transport& transport = transports[static_cast<size_t>(rank)];
      ASSERT_TRUE(GroupMemory::Create(transport, AllTogether(2), kSlotBytes, &memory).ok());
      ASSERT_TRUE(PeerMemory::Probe(transport, true, *memory).ok());
      // Rank 0 learns of a failure when it first checks, rank 1 from what rank 0 leaves.
      Waiter waiter(
          [&, rank] {
            if (rank == 0 || gave_up) return Status(DDL_ABORTED, "rank 7 died");
            return Status();
          },
          30, 2);
      ShmPipeline pipeline(*memory, waiter);
      const View from(sizeof(float), in[rank].data(), in[rank].size());
      const View to(sizeof(float), out[rank].data(), out[rank].size());
      statuses[rank] = ddl::CmaAllReduce(pipeline, from, to, {DDL_FLOAT32, DDL_SUM, 1}, 4096);
      if (rank == 0) {
        written_before = static_cast<size_t>(std::count(out[0].begin(), out[0].end(), 2.0f));
        gave_up = true;
      }
      char mine = 0;
      std::vector<char> all(2);
      transport.all_gather(transport.self, &mine, all.data(), 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (ddl_transport& transport : transports) transport.destroy(transport.self);
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), DDL_ABORTED);
    EXPECT_EQ(status.message(), "rank 7 died");
  }
  EXPECT_EQ(static_cast<size_t>(std::count(out[0].begin(), out[0].end(), 2.0f)), written_before);
  EXPECT_LT(written_before, out[0].size());
}

// The exceptions that the standard library throws for too little memory; the second for an impossible size.
TEST(PeerMemoryTest, ARankThatThrowsIsNoLongerWrittenTo) {
  for (const bool no_machine_has_it : {false, true}) {
    RunGroup(2, [&](GroupMemory& memory, ShmPipeline& pipeline) {
      float value = 1;
      const View view(sizeof value, &value, 1);
      bool fit = false;
      const auto shortage = [&](ddl::CmaStep&) -> Status {
        if (no_machine_has_it) throw std::length_error("no machine has it");
        throw std::bad_alloc();
      };
      EXPECT_THROW((void)ddl::CmaStep::Run(pipeline, view, view, &fit, shortage), std::exception);
      EXPECT_EQ(memory.own().access_revoked, 1u);
    });
  }
}

TEST(PeerMemoryTest, NoRankWritesAfterAccessWasRevoked) {
  RunGroup(2, [](GroupMemory& memory, ShmPipeline& pipeline) {
    static int target = 0;
    int mine = 7;
    std::vector<iovec> local{{&mine, sizeof mine}};
    std::vector<iovec> remote{{&target, sizeof target}};
    if (memory.local_rank() == 0) pipeline.peers().RevokeAccess();
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

TEST(PeerMemoryTest, RevokeAccessWaitsForAWriteInProgress) {
  RunGroup(2, [](GroupMemory& memory, ShmPipeline& pipeline) {
    static std::atomic<bool> ended{false};
    const uint64_t step = pipeline.Reserve(1);
    if (memory.local_rank() == 1) {
      ended = false;
      memory.own().writes_to = 1;
    }
    pipeline.MarkReady(step);
    ASSERT_TRUE(pipeline.WaitReady(step).ok());
    if (memory.local_rank() == 1) {
      usleep(20'000);
      ended = true;
      memory.own().writes_to = 0;
    } else {
      pipeline.peers().RevokeAccess();
      EXPECT_TRUE(ended);
    }
  });
}

// A child process, alive or dead.
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

TEST_F(ChildTest, IsReadAndWrittenWhileAliveAndAnErrorAfterwards) {
  RunGroup(2, [this](GroupMemory& memory, ShmPipeline& pipeline) {
    if (memory.local_rank() == 1) return;
    static int value = 1;  // at the same address in the child
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // in case the parent gave up
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

TEST(PeerMemoryTest, AnInvalidAddressIsAnErrorThatNamesTheRemedy) {
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
