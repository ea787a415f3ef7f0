// Waiter: how the thread that runs a collective waits for other ranks in the middle of it: it looks often at first,
// then gives its core away, and never waits for a rank that is dead.
#ifndef KERAS_DDL_CORE_BASE_WAITER_H_
#define KERAS_DDL_CORE_BASE_WAITER_H_

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "base/status.h"

namespace ddl {

// Seconds of the monotonic clock.
double Now();

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Waiter {
 public:
  // `health` is asked about once a millisecond in a long wait, and about ten times a second in a row of short ones (a
  // rank that is always the last to come hardly waits, but must show that it lives); what it returns, if not OK, ends
  // the wait.
  // `sharers`: ranks that wait for each other on this host; with more of them than cores, spinning only keeps the
  // awaited rank from running.
  Waiter(std::function<Status()> health, double deadline_s, int sharers);

  // How often to look before the first sched_yield.
  int spins() const { return spins_; }

  // After `after_s` seconds without progress `warn(waits_for, seconds)` is called; it returns after how many in all to
  // call it again.
  void SetWarning(double after_s, std::function<double(const std::string&, double)> warn) {
    warn_after_s_ = after_s;
    warn_ = std::move(warn);
  }
  // While this thread waits, it also calls `progress`, which does what it can without waiting and sets its argument
  // when that was something; an error ends the wait. Null: nothing to do.
  void SetProgress(std::function<Status(bool* moved)> progress) { progress_ = std::move(progress); }

  // Waits until ready() returns true. `waits_for`: called for the message when the deadline passes.
  template <typename Ready, typename Describe>
  Status Until(Ready ready, Describe waits_for) {
    const int spins = progress_ ? kFewSpins : spins_;  // spinning would keep the messages waiting
    for (int i = 0; i < spins; ++i) {
      if (ready()) return CountShortWait();
      CpuRelax();
    }
    double start = Now();
    DDL_RETURN_IF_ERROR(LookIfDue(start));
    double checked = start;
    double warn_after = warn_after_s_;
    for (;;) {
      if (ready()) return {};
      bool moved = false;
      if (progress_) DDL_RETURN_IF_ERROR(progress_(&moved));
      const double now = Now();
      if (moved) {
        start = now;
        warn_after = warn_after_s_;
      }
      if (now - checked > kHealthSeconds) {
        checked = now;
        DDL_RETURN_IF_ERROR(Look(now));
        if (warn_ && now - start > warn_after) warn_after = warn_(waits_for(), now - start);
        if (deadline_s_ > 0 && now - start > deadline_s_) return Late(waits_for(), now - start);
      }
      // Yielding costs little while every rank has a core and is what lets the others run when they have not; after
      // a while the peer is not about to answer and sleeping leaves the core to TensorFlow.
      if (moved) continue;
      if (progress_) {
        // The network is slow against the pauses, several messages are under way, and the other ranks need the core.
        const double pause_s = std::clamp((now - start) / 8, kShortestPauseSeconds, kLongestPauseSeconds);
        const timespec pause{0, static_cast<long>(pause_s * 1e9)};
        nanosleep(&pause, nullptr);
      } else if (now - start < kYieldSeconds) {
        sched_yield();
      } else {
        const timespec pause{0, now - start < kShortSleepSeconds ? 20'000 : 200'000};
        nanosleep(&pause, nullptr);
      }
    }
  }

  Status Health() { return health_(); }
  // For who works for long without waiting: asks about health when that has not happened for a while.
  Status LookIfDue(double now) {
    if (now - looked_.load(std::memory_order_relaxed) < kLongestUnseenSeconds) return {};
    return Look(now);
  }

 private:
  static constexpr int kSpins = 2000;
  static constexpr int kFewSpins = 20;
  static constexpr double kYieldSeconds = 1e-3;
  static constexpr double kShortSleepSeconds = 20e-3;
  static constexpr double kHealthSeconds = 1e-3;
  static constexpr double kLongestUnseenSeconds = 0.1;
  // Waits that end at once read the clock once in so many: that costs the small ones nothing to speak of.
  static constexpr uint32_t kShortWaitsPerLook = 16;
  static constexpr double kShortestPauseSeconds = 10e-6;
  static constexpr double kLongestPauseSeconds = 200e-6;

  static Status Late(const std::string& waits_for, double seconds);

  Status CountShortWait() {
    const uint32_t waits = short_waits_.load(std::memory_order_relaxed) + 1;
    short_waits_.store(waits, std::memory_order_relaxed);
    if (waits % kShortWaitsPerLook != 0) return {};
    return LookIfDue(Now());
  }
  Status Look(double now) {
    looked_.store(now, std::memory_order_relaxed);
    return health_();
  }

  std::function<Status()> health_;
  double deadline_s_;
  double warn_after_s_ = 0;
  std::function<double(const std::string&, double)> warn_;
  int spins_;
  std::function<Status(bool* moved)> progress_;
  // Atomic because the communication thread and calling threads wait in turn; a lost count does no harm.
  std::atomic<double> looked_{0};
  std::atomic<uint32_t> short_waits_{0};
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_WAITER_H_
