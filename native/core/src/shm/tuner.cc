#include "shm/tuner.h"

#include <algorithm>
#include <limits>

namespace ddl {
namespace {

constexpr uint32_t kKilobyte = 1024;
constexpr uint64_t kMegabyte = 1024 * 1024;
constexpr uint32_t kCmaChunk = 64 * kKilobyte;

// Counted trials of each candidate: a few long ones, more short ones, which a hiccup disturbs more.
constexpr double kTrialSeconds = 1.5e-3;
constexpr double kMinTrials = 3;
constexpr double kMaxTrials = 12;
// Sizes from here on do not fit into caches: what is best for one is best for all.
constexpr size_t kLargestSizeClass = 24;
// Calls in a turn for sizes below this; from here on one, and the first round is not counted: it finds cold memory.
constexpr size_t kCallsPerTurn = 4;
constexpr uint64_t kCachedBytes = 16 * kMegabyte;
// A moving average this far from the reference means that conditions have changed.
constexpr double kSlower = 1.35;
constexpr double kFaster = 0.7;
constexpr double kRecentWeight = 0.1;
constexpr int kSettlingUses = 16;
// Explore no more often than the first, so that it costs little on a noisy machine, and no less often than the second.
constexpr double kMinExploreSeconds = 1.0;
constexpr double kMaxExploreSeconds = 20.0;
// And use at most one call in this many: a program that reduces once a second should not spend its calls on trials.
constexpr uint64_t kCallsPerTrial = 50;

}  // namespace

std::vector<Scheme> CandidateSchemes(uint64_t bytes, int ranks, size_t slot_bytes, bool reachable) {
  const auto chunk = [&](uint32_t kilobytes) {
    return static_cast<uint32_t>(std::min<uint64_t>(kilobytes * uint64_t{kKilobyte}, slot_bytes));
  };
  constexpr Algorithm kDirect = Algorithm::kDirect;
  constexpr Algorithm kSplit = Algorithm::kSplit;
  constexpr Store kC = Store::kCached;
  constexpr Store kS = Store::kStreaming;
  constexpr Store kL = Store::kRepMovsb;
  if (bytes <= kUntunedBytes) return {{kDirect, kL, kC, chunk(64)}};
  std::vector<Scheme> schemes;
  if (ranks == 2) {
    // Results beyond the caches are not found there by their reader, and streaming them saves reading them first.
    if (bytes < kMegabyte) {
      schemes = {{kSplit, kL, kC, chunk(256)},
                 {kDirect, kL, kC, chunk(128)},
                 {kSplit, kL, kC, chunk(128)},
                 {kSplit, kL, kC, chunk(64)},
                 {kSplit, kS, kC, chunk(256)}};
    } else if (bytes < 16 * kMegabyte) {
      schemes = {{kSplit, kL, kC, chunk(256)}, {kSplit, kL, kL, chunk(256)},  {kSplit, kL, kS, chunk(256)},
                 {kSplit, kS, kS, chunk(256)}, {kDirect, kL, kC, chunk(128)}, {kSplit, kL, kC, chunk(512)}};
    } else {
      schemes = {{kDirect, kL, kS, chunk(128)},
                 {kDirect, kL, kC, chunk(128)},
                 {kSplit, kL, kS, chunk(512)},
                 {kDirect, kL, kS, chunk(256)},
                 {kSplit, kS, kS, chunk(256)}};
    }
  } else {
    // Direct reads every slot but waits only once per step, which matters when several ranks share a core.
    const Store result = bytes < 4 * kMegabyte ? kC : kS;
    schemes = {{kSplit, kL, result, chunk(512)}, {kSplit, kL, kL, chunk(512)}, {kDirect, kL, result, chunk(128)}};
    if (bytes >= 512 * kKilobyte) {
      schemes.push_back({kSplit, kS, result, chunk(512)});
      schemes.push_back({kSplit, kL, result, chunk(256)});
      schemes.push_back({kDirect, kL, result, chunk(512)});
    }
  }
  if (reachable) {
    // What was read should still be in the second-level cache when it is added.
    schemes.push_back({Algorithm::kCma, kC, kC, kCmaChunk});
    schemes.push_back({Algorithm::kCma, kC, kC, 2 * kCmaChunk});
  }
  return schemes;
}

Tuner::SizeClass& Tuner::SizeClassOf(uint64_t bytes) {
  size_t log2 = 0;
  while (bytes >> (log2 + 1) != 0) ++log2;
  log2 = std::min(log2, kLargestSizeClass);
  SizeClass& c = classes_[log2];
  if (c.candidates.empty()) {
    c.candidates = CandidateSchemes(uint64_t{1} << log2, ranks_, slot_bytes_, reachable_);
    c.times.resize(c.candidates.size());
    c.turn = uint64_t{1} << log2 < kCachedBytes ? kCallsPerTurn : 1;
  }
  return c;
}

Scheme Tuner::Choose(uint64_t bytes) {
  const SizeClass& c = SizeClassOf(bytes);
  return c.candidates[c.exploring ? c.trial / c.turn % c.candidates.size() : c.chosen];
}

void Tuner::Report(uint64_t bytes, double seconds, double now) {
  SizeClass& c = SizeClassOf(bytes);
  if (c.candidates.size() == 1) return;
  ++c.calls;
  const double per_byte = seconds / static_cast<double>(bytes);
  if (c.exploring) {
    Explore(c, seconds, per_byte, now);
    return;
  }
  if (c.uses < kSettlingUses) {
    // The time in steady use: the mean, because the best of the trials was partly luck.
    c.reference += (per_byte - c.reference) / static_cast<double>(++c.uses);
    c.recent = c.reference;
    return;
  }
  // An outlier (a rank that was descheduled) should not look like changed conditions.
  c.recent += kRecentWeight * (std::min(per_byte, 4 * c.recent) - c.recent);
  const double age = now - c.explored_at;
  const bool changed = c.recent > kSlower * c.reference || c.recent < kFaster * c.reference;
  // c.trial: calls of the last exploration.
  const bool affordable = kCallsPerTrial * (c.trials_again + c.trial) <= c.calls;
  if (affordable && (age > kMaxExploreSeconds || (changed && age > kMinExploreSeconds))) {
    c.exploring = true;
    c.trial = 0;
    c.rounds = 0;
    for (auto& times : c.times) times.clear();
  }
}

void Tuner::Explore(SizeClass& c, double seconds, double seconds_per_byte, double now) {
  const size_t n = c.candidates.size();
  const bool counted = c.turn > 1 ? c.trial % c.turn != 0 : c.trial >= n;
  if (counted) c.times[c.trial / c.turn % n].push_back(seconds_per_byte);
  if (++c.trial == c.turn * n) {
    const auto wanted = static_cast<size_t>(std::clamp(kTrialSeconds / seconds, kMinTrials, kMaxTrials));
    c.rounds = c.turn > 1 ? (wanted + c.turn - 2) / (c.turn - 1) : 1 + wanted;
  }
  if (c.trial < c.turn * n || c.trial < c.rounds * c.turn * n) return;
  double shortest = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < n; ++i) {
    auto& times = c.times[i];
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    if (*middle < shortest) {
      shortest = *middle;
      c.chosen = i;
    }
  }
  if (c.explored) c.trials_again += c.trial;
  c.explored = true;
  c.exploring = false;
  c.reference = 0;
  c.uses = 0;
  c.explored_at = now;
}

}  // namespace ddl
