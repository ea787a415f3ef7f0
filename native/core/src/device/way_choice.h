// WayChoice: the fastest of the ways in which a collective on device memory can run, for one kind of collective and one
// size class. The ways are timed on the program's own collectives, in turns. Afterwards the choice stays.
#ifndef KERAS_DDL_CORE_DEVICE_WAY_CHOICE_H_
#define KERAS_DDL_CORE_DEVICE_WAY_CHOICE_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "ddl.h"

namespace ddl {

enum class Way : uint8_t {
  kLibrary,       // the device's library, among all ranks
  kHierarchical,  // the library inside hosts, this engine's rings between them
  kStaged,        // through the host's memory
  kUnknown,
};
constexpr size_t kNumWays = 3;

class WayChoice {
 public:
  // kUnknown until Choose. Any thread; the other functions are for one thread.
  Way chosen() const { return chosen_.load(std::memory_order_relaxed); }
  // The way whose turn it is. `ways`: the same in all calls and on all ranks.
  Way Next(const std::vector<Way>& ways) const { return ways[runs_ % ways.size()]; }
  // Records a run of `Next`. True: each way has had its turns, and it is time to agree and to choose.
  bool Record(const std::vector<Way>& ways, double seconds) {
    // The first turn of a way allocates memory and connects, and does not count.
    double& best = fastest_[static_cast<size_t>(Next(ways))];
    if (runs_ >= ways.size()) best = std::min(best, seconds);
    return ++runs_ == kTurns * ways.size();
  }
  // By way, seconds of this rank's fastest run; ranks agree on the largest. Ways without a turn have infinity.
  std::array<double, kNumWays>& seconds() { return fastest_; }
  void Choose() {
    const auto fastest = std::min_element(fastest_.begin(), fastest_.end()) - fastest_.begin();
    chosen_.store(static_cast<Way>(fastest), std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kTurns = 4;
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  std::atomic<Way> chosen_{Way::kUnknown};
  size_t runs_ = 0;
  std::array<double, kNumWays> fastest_{kNever, kNever, kNever};
};

// The choices for all kinds of collectives that a library runs, and sizes between two powers of two.
class WayChoices {
 public:
  WayChoice& For(uint32_t kind, uint64_t bytes) {
    size_t size_class = 0;
    while (size_class + 1 < kSizeClasses && bytes >> size_class > 1) ++size_class;
    return choices_[kind][size_class];
  }

 private:
  static constexpr size_t kKinds = DDL_ALL_GATHER + 1;  // the first ones of ddl_kind
  static constexpr size_t kSizeClasses = 40;
  std::array<std::array<WayChoice, kSizeClasses>, kKinds> choices_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_DEVICE_WAY_CHOICE_H_
