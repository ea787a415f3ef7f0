#include "shm/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace ddl {
namespace {

long Futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the futex word is the atomic itself");
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void RingBell(RankBlock& block) {
  block.bell.fetch_add(1, std::memory_order_seq_cst);
  if (block.sleeping.load(std::memory_order_seq_cst) != 0) Futex(&block.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

void SleepUntilRung(RankBlock& own, uint32_t seen, int64_t timeout_us) {
  own.sleeping.store(1, std::memory_order_seq_cst);
  timespec timeout{};
  timeout.tv_sec = timeout_us / 1000000;
  timeout.tv_nsec = (timeout_us % 1000000) * 1000;
  // Returns at once when the bell has moved on since `seen`.
  Futex(&own.bell, FUTEX_WAIT, seen, &timeout);
  own.sleeping.store(0, std::memory_order_seq_cst);
}

}  // namespace ddl
