#include "pinned_pool.h"

#include <sys/mman.h>

namespace ddl_cuda {
namespace {

constexpr size_t kSmallest = 64 * 1024;
constexpr size_t kHuge = size_t{2} * 1024 * 1024;

size_t Rounded(size_t bytes) {
  if (bytes > kHuge) return (bytes + kHuge - 1) / kHuge * kHuge;
  size_t rounded = kSmallest;
  while (rounded < bytes) rounded *= 2;
  return rounded;
}

}  // namespace

void PinnedPool::Clear() {
  for (const auto& [bytes, memory] : available_) {
    if (blocks_.at(memory).locked) cuda_.MemHostUnregister(memory);
    munmap(memory, bytes);
  }
  available_.clear();
}

void* PinnedPool::Take(size_t bytes) {
  const size_t wanted = Rounded(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = available_.lower_bound(wanted);
  if (found != available_.end() && found->first <= 2 * wanted) {
    void* const memory = found->second;
    available_.erase(found);
    return memory;
  }
  void* const memory = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  if (wanted >= kHuge) madvise(memory, wanted, MADV_HUGEPAGE);
  madvise(memory, wanted, MADV_DONTFORK);  // a forked child would take the pages that the device uses
  // A system may refuse the lock. Then copies are slower, and may block the thread that starts them.
  const bool locked = cuda_.MemHostRegister(memory, wanted, kHostRegisterPortable) == kCudaSuccess;
  blocks_[memory] = {wanted, locked};
  return memory;
}

void PinnedPool::GiveBack(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  available_.emplace(blocks_.at(memory).bytes, memory);
}

}  // namespace ddl_cuda
