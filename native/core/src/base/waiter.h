// Waiter: how the thread that runs a collective waits for other ranks. It spins at first, then yields its core, then
// sleeps. It never waits for a rank that has died.
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
  // `health` is called about once a millisecond in a long wait, and about ten times a second in a series of short ones
  // (a rank that is always the last to arrive hardly waits, but must show that it is alive). A status other than OK
  // ends the wait. `sharers`: ranks that wait for each other on this host; with more of them than cores, spinning only
  // keeps the awaited rank from running.
  Waiter(std::function<Status()> health, double deadline_s, int sharers);

  // How many times to poll before the first sched_yield.
  int spins() const { return spins_; }

  // After `after_s` seconds without progress `warn(waits_for, seconds)` is called. It returns the total seconds after
  // which to call it again.
  void SetWarning(double after_s, std::function<double(const std::string&, double)> warn) {
    warn_after_s_ = after_s;
    warn_ = std::move(warn);
  }
  // While this thread waits, it also calls `progress`, which works without blocking and sets its argument if it did
  // anything. An error ends the wait. Null: nothing to do.
  void SetProgress(std::function<Status(bool* moved)> progress) { progress_ = std::move(progress); }

  // Waits until ready() returns true. `waits_for`: called for the message when the deadline passes.
  template <typename Ready, typename Describe>
  Status Until(Ready ready, Describe waits_for) {
    const int spins = progress_ ? kReducedSpins : spins_;  // spinning would delay the messages
    for (int i = 0; i < spins; ++i) {
      if (ready()) return CountShortWait();
      CpuRelax();
    }
    double start = Now();
    DDL_RETURN_IF_ERROR(CheckHealthIfDue(start));
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
        DDL_RETURN_IF_ERROR(CheckHealth(now));
        if (warn_ && now - start > warn_after) warn_after = warn_(waits_for(), now - start);
        if (deadline_s_ > 0 && now - start > deadline_s_) return DeadlineExceeded(waits_for(), now - start);
      }
      // Yielding costs little while every rank has a core, and lets the others run when they do not have one. After a
      // while a quick answer is unlikely, and sleeping leaves the core to TensorFlow.
      if (moved) continue;
      if (progress_) {
        // The network is slow compared with the pauses, several messages are in flight, and other ranks need the core.
        const double pause_s = std::clamp((now - start) / 8, kMinPauseSeconds, kMaxPauseSeconds);
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
  // For code that works for long without waiting: checks health if the last check was a while ago.
  Status CheckHealthIfDue(double now) {
    if (now - last_check_.load(std::memory_order_relaxed) < kMaxUncheckedSeconds) return {};
    return CheckHealth(now);
  }

 private:
  static constexpr int kSpins = 2000;
  static constexpr int kReducedSpins = 20;
  static constexpr double kYieldSeconds = 1e-3;
  static constexpr double kShortSleepSeconds = 20e-3;
  static constexpr double kHealthSeconds = 1e-3;
  static constexpr double kMaxUncheckedSeconds = 0.1;
  // Waits that end at once only read the clock once in this many, so that they cost almost nothing.
  static constexpr uint32_t kShortWaitsPerCheck = 16;
  static constexpr double kMinPauseSeconds = 10e-6;
  static constexpr double kMaxPauseSeconds = 200e-6;

  static Status DeadlineExceeded(const std::string& waits_for, double seconds);

  Status CountShortWait() {
    const uint32_t waits = short_waits_.load(std::memory_order_relaxed) + 1;
    short_waits_.store(waits, std::memory_order_relaxed);
    if (waits % kShortWaitsPerCheck != 0) return {};
    return CheckHealthIfDue(Now());
  }
  Status CheckHealth(double now) {
    last_check_.store(now, std::memory_order_relaxed);
    return health_();
  }

  std::function<Status()> health_;
  double deadline_s_;
  double warn_after_s_ = 0;
  std::function<double(const std::string&, double)> warn_;
  int spins_;
  std::function<Status(bool* moved)> progress_;
  // Atomic because the communication thread and calling threads wait in turn; a lost count does no harm.
  std::atomic<double> last_check_{0};
  std::atomic<uint32_t> short_waits_{0};
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_WAITER_H_
