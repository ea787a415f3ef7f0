#include "shm/tuner.h"

#include <algorithm>
#include <limits>

namespace ddl {
namespace {

// First turns of each candidate. Short calls get more turns than long ones, because a hiccup disturbs them more.
constexpr double kTrialSeconds = 1.5e-3;
constexpr double kMinTrials = 3;
constexpr double kMaxTrials = 12;
// From this size on, arrays do not fit into caches, and the best scheme is the same for all sizes.
constexpr size_t kLargestSizeClass = 24;
// Calls in a turn. The first does not count, because it starts with another scheme's data in the caches.
constexpr size_t kCallsPerTurn = 4;
// The largest fraction of the time of all calls that regular trials may cost, and the same again for urgent trials.
constexpr double kAffordable = 0.015;
constexpr uint64_t kTurnsPerTrial = 8;
// The scheme in use is replaced only by one that is faster by more than chance.
constexpr double kBetter = 0.97;
constexpr uint64_t kTrialsToChange = 3;
constexpr uint64_t kRemembered = 6;  // trials in the moving average
// A fast moving average this far from the slow one means that conditions have changed.
constexpr double kSlower = 1.35;
constexpr double kFaster = 0.7;
constexpr double kRecentWeight = 0.3;
constexpr double kUsualWeight = 0.02;

double Median(std::vector<double>& times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

}  // namespace

Tuner::SizeClass& Tuner::SizeClassOf(ddl_kind kind, uint64_t bytes) {
  size_t log2 = 0;
  while (bytes >> (log2 + 1) != 0) ++log2;
  log2 = std::min(log2, kLargestSizeClass);
  SizeClass& c = classes_[{kind, log2}];
  if (c.candidates.empty()) {
    for (const Scheme& scheme : CandidateSchemes(kind, uint64_t{1} << log2, ranks_, slot_bytes_, reachable_)) {
      c.candidates.emplace_back();
      c.candidates.back().scheme = scheme;
    }
  }
  return c;
}

Scheme Tuner::Choose(ddl_kind kind, uint64_t bytes) {
  const SizeClass& c = SizeClassOf(kind, bytes);
  return c.candidates[c.current].scheme;
}

void Tuner::Report(ddl_kind kind, const Scheme& scheme, uint64_t bytes, double seconds) {
  SizeClass& c = SizeClassOf(kind, bytes);
  // A scheme that was chosen before the last turn ended says nothing about this turn.
  if (c.candidates.size() == 1 || scheme.Encode() != c.candidates[c.current].scheme.Encode()) return;
  const double time = seconds / static_cast<double>(bytes);
  c.total += time;
  if (c.call > 0) c.times.push_back(time);
  if (++c.call < kCallsPerTurn) return;
  const double median = Median(c.times);
  c.times.clear();
  c.call = 0;
  ++c.turn;
  if (c.settled) {
    EndTurn(c, median);
  } else {
    EndFirstTurn(c, median, seconds);
  }
}

void Tuner::EndFirstTurn(SizeClass& c, double time, double seconds) {
  const size_t n = c.candidates.size();
  c.candidates[c.current].times.push_back(time);
  c.current = (c.current + 1) % n;
  if (c.turn == n) {
    const auto wanted = static_cast<uint64_t>(std::clamp(kTrialSeconds / seconds, kMinTrials, kMaxTrials));
    c.rounds = (wanted + kCallsPerTurn - 2) / (kCallsPerTurn - 1);
  }
  if (c.turn < n || c.turn < c.rounds * n) return;
  double shortest = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < n; ++i) {
    Candidate& candidate = c.candidates[i];
    candidate.ratio = Median(candidate.times);
    candidate.times = {};
    if (candidate.ratio < shortest) {
      shortest = candidate.ratio;
      c.chosen = i;
    }
  }
  for (Candidate& candidate : c.candidates) {
    candidate.ratio /= shortest;
    candidate.trials = 1;
  }
  c.current = c.chosen;
  c.settled = true;
}

void Tuner::EndTurn(SizeClass& c, double time) {
  if (c.current != c.chosen) {
    c.trial = time;
    c.tried = c.current;
    c.current = c.chosen;
    return;
  }
  if (c.trial > 0) {
    const double reference = (c.before + time) / 2;
    const double lost = std::max(0.0, c.trial - reference) * static_cast<double>(kCallsPerTurn);
    Learn(c, c.trial / reference, lost);
    c.trial = 0;
    if (c.current != c.chosen) {  // changed
      c.current = c.chosen;
      c.before = 0;
      return;
    }
  }
  LookForChange(c, time);
  c.before = time;
  c.current = NextTrial(c);
  if (c.current != c.chosen) {
    c.urgent = IsUrgent(c.candidates[c.current]);
    c.candidates[c.current].last_trial = c.turn;
    c.last_trial = c.turn;
  }
}

void Tuner::Learn(SizeClass& c, double ratio, double lost) {
  Candidate& tried = c.candidates[c.tried];
  (c.urgent ? c.lost_urgently : tried.lost) += lost;
  // A single hiccup, of either scheme, must not decide.
  if (tried.trials > 0) ratio = std::clamp(ratio, tried.ratio / 2, tried.ratio * 2);
  tried.trials = std::min(tried.trials + 1, kRemembered);
  tried.ratio += (ratio - tried.ratio) / static_cast<double>(tried.trials);
  if (tried.trials < kTrialsToChange || tried.ratio > kBetter) return;
  const double better = tried.ratio;
  for (Candidate& candidate : c.candidates) candidate.ratio /= better;
  c.chosen = c.tried;
  c.usual = 0;
}

// Whether the candidate was not tried since conditions changed, or may be better than the scheme in use.
bool Tuner::IsUrgent(const Candidate& candidate) {
  return candidate.trials == 0 || (candidate.trials < kTrialsToChange && candidate.ratio <= kBetter);
}

void Tuner::LookForChange(SizeClass& c, double time) {
  if (c.usual == 0) c.usual = c.recent = time;
  // An outlier (a rank that was descheduled) should not look like changed conditions.
  c.recent += kRecentWeight * (std::min(time, 4 * c.recent) - c.recent);
  c.usual += kUsualWeight * (std::min(time, 4 * c.usual) - c.usual);
  if (c.recent <= kSlower * c.usual && c.recent >= kFaster * c.usual) return;
  double cost = 0;
  for (const Candidate& candidate : c.candidates) cost += std::max(0.0, candidate.ratio - 1);
  cost *= c.recent * static_cast<double>(kCallsPerTurn);
  if (c.lost_urgently + cost > kAffordable * c.total) return;
  c.usual = c.recent;
  for (Candidate& candidate : c.candidates) candidate.trials = 0;
}

size_t Tuner::NextTrial(const SizeClass& c) {
  const bool due = c.turn >= c.last_trial + kTurnsPerTrial;
  const double part = kAffordable / static_cast<double>(c.candidates.size() - 1);
  size_t next = c.chosen;
  for (size_t i = 0; i < c.candidates.size(); ++i) {
    const Candidate& candidate = c.candidates[i];
    if (i == c.chosen) continue;
    const double cost = std::max(0.0, candidate.ratio - 1) * c.recent * static_cast<double>(kCallsPerTurn);
    const bool wanted = IsUrgent(candidate) || (due && candidate.lost + cost <= part * c.total);
    if (wanted && (next == c.chosen || candidate.last_trial < c.candidates[next].last_trial)) next = i;
  }
  return next;
}

}  // namespace ddl
