#include "hand_over.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels/kernels.h"

namespace {

constexpr size_t kLine = 64;
constexpr uint64_t kSlots = 4;
constexpr size_t kLargestSlot = 512 * 1024;  // larger arrays pass through in pieces
constexpr int kSpins = 2000;

struct alignas(2 * kLine) Flag {
  std::atomic<uint64_t> passes;
};

struct Layout {
  char* shared;
  int size;
  size_t slot;

  Layout(char* memory, int ranks, size_t bytes)
      : shared(memory), size(ranks), slot((std::min(bytes, kLargestSlot) + 4095) / 4096 * 4096) {}
  size_t flags() const { return (static_cast<size_t>(size) * sizeof(Flag) + 4095) / 4096 * 4096; }
  size_t bytes() const { return flags() + static_cast<size_t>(size) * kSlots * slot; }
  std::atomic<uint64_t>& passes(int rank) const { return reinterpret_cast<Flag*>(shared)[rank].passes; }
  char* slot_of(int rank, uint64_t turn) const {
    return shared + flags() + (static_cast<size_t>(rank) * kSlots + turn % kSlots) * slot;
  }
};

void WaitForAll(const Layout& layout, int rank, uint64_t passes) {
  for (int other = 0; other < layout.size; ++other) {
    if (other == rank) continue;
    for (int spins = 0; layout.passes(other).load(std::memory_order_acquire) < passes; ++spins) {
      if (spins > kSpins / layout.size) sched_yield();
    }
  }
}

}  // namespace

size_t hand_over_shared_bytes(int size, size_t bytes) { return Layout(nullptr, size, bytes).bytes(); }

double hand_over_seconds(char* shared, int rank, int size, char* own, size_t bytes, int repeat, int whole) {
  const Layout layout(shared, size, bytes);
  std::atomic<uint64_t>& passes = layout.passes(rank);
  uint64_t pass = passes.load();  // equal on all ranks between calls
  uint64_t turn = pass;
  const auto count = static_cast<size_t>(size);
  const auto me = static_cast<size_t>(rank);
  const auto enter = [&] {
    passes.store(++pass, std::memory_order_release);
    WaitForAll(layout, rank, pass);
  };
  enter();
  enter();
  const auto read = [&](size_t from_rank, size_t begin, size_t n, size_t at) {
    ddl::Copy(own + at + begin, layout.slot_of(static_cast<int>(from_rank), turn) + begin, n, ddl::Store::kRepMovsb);
  };
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeat; ++i) {
    for (size_t at = 0; at < bytes; at += layout.slot, ++turn) {
      const size_t n = std::min(layout.slot, bytes - at);
      const size_t shard = n / count;  // ignores the remainder
      char* const slot = layout.slot_of(rank, turn);
      if (whole != 0) {
        ddl::Copy(slot, own + at, n, ddl::Store::kRepMovsb);
        enter();
        for (size_t j = 1; j < count; ++j) read((me + j) % count, 0, n, at);
        continue;
      }
      // Inputs: writes this rank's part of the other ranks' shards, and reads their parts of its own shard.
      ddl::Copy(slot, own + at, me * shard, ddl::Store::kRepMovsb);
      ddl::Copy(slot + (me + 1) * shard, own + at + (me + 1) * shard, n - (me + 1) * shard, ddl::Store::kRepMovsb);
      enter();
      for (size_t j = 1; j < count; ++j) read((me + j) % count, me * shard, shard, at);
      // Results: the reverse.
      ddl::Copy(slot + me * shard, own + at + me * shard, shard, ddl::Store::kRepMovsb);
      enter();
      for (size_t j = 1; j < count; ++j) read((me + j) % count, (me + j) % count * shard, shard, at);
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  enter();
  enter();
  return took.count() / repeat;
}
