// Ranks as threads that read and write each other's memory, and buffers in pieces.
#ifndef KERAS_DDL_TESTS_SHM_PEER_GROUP_H_
#define KERAS_DDL_TESTS_SHM_PEER_GROUP_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/view.h"
#include "shm/group_memory.h"
#include "shm/peer_memory.h"
#include "shm/pipeline.h"
#include "thread_group.h"
#include "thread_transport.h"

namespace ddl_test {

using ddl::GroupMemory;
using ddl::PeerMemory;
using ddl::ShmPipeline;
using ddl::Status;
using ddl::View;
using ddl::Waiter;

constexpr size_t kSlotBytes = 16 * 1024;

// An emulator of another processor (qemu user mode) may lack the system calls.
inline bool SystemHasTheCalls() {
  char byte = 0;
  std::vector<iovec> bytes = {{&byte, 1}};
  return PeerMemory::Accessible(bytes);
}

// Runs `body` on `size` threads that share memory and, if `wanted`, access each other's. `health`: see Waiter.
inline void RunGroup(
    int size, const std::function<void(GroupMemory&, ShmPipeline&)>& body, bool wanted = true,
    const std::function<Status(int rank)>& health = [](int) { return Status(); }) {
  if (wanted && !SystemHasTheCalls()) GTEST_SKIP() << "this system has no process_vm_readv";
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
      Waiter waiter([&health, rank] { return health(rank); }, 30, size);
      ShmPipeline pipeline(*memory, waiter);
      body(*memory, pipeline);
      // No rank frees memory that another rank may still read.
      char mine = 0;
      std::vector<char> all(static_cast<size_t>(size));
      transport.all_gather(transport.self, &mine, all.data(), 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (ddl_transport& transport : transports) transport.destroy(transport.self);
}

// Buffers of `count` floats, split into pieces of `piece` floats with gaps between them.
struct Pieces {
  Pieces(uint64_t count, uint64_t length) : piece(length), view(sizeof(float)) {
    memory.assign(count + count / piece + 1, kGap);
    for (uint64_t at = 0; at < count; at += piece) {
      view.Add(&memory[at + at / piece], std::min(piece, count - at));
    }
  }
  void ExpectGaps() const {
    for (uint64_t gap = piece; gap < memory.size(); gap += piece + 1) ASSERT_EQ(memory[gap], kGap);
  }
  static constexpr float kGap = -77;
  uint64_t piece;
  std::vector<float> memory;
  View view;
};

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_SHM_PEER_GROUP_H_
