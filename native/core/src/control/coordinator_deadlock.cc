// Detects deadlocks: ranks that wait for one another in different collectives, none of which can complete.
//
// A rank that waits in the collective X cannot submit another one before X ends if its main thread is blocked in X, or
// if its process is known to be idle, because then no thread is left that could submit anything. If one such rank waits
// in a collective that another such rank has not submitted, the collective never completes. Ranks that compute, or
// whose state is unknown, prove nothing, however long they take.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "control/coordinator.h"

namespace ddl {
namespace {

constexpr double kLookSeconds = 0.2;
// The pause only gives time to a rank that is between two calls from other threads.
constexpr double kBlockedGraceSeconds = 1.0;
// How long a rank must have been idle. It is asked when its collectives have not changed for a while. Its second reply
// has the idle time since the first reply.
constexpr double kIdleSeconds = 4.0;
constexpr double kSettledSeconds = 1.0;
constexpr double kAskAgainSeconds = kIdleSeconds + 0.2;
// The number of wait sets examined, and of ranks asked per set until one is idle.
constexpr size_t kMaxWaitSets = 8;
constexpr size_t kMaxAskedPerSet = 2;

}  // namespace

std::vector<Coordinator::WaitSet> Coordinator::WaitSets(double now) const {
  std::vector<WaitSet> by_rank(static_cast<size_t>(size_));
  for (const auto& [name, entry] : waiting_) {
    ranks_looked_at_ += static_cast<uint64_t>(size_);
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      const auto& queue = entry.by_rank[rank];
      WaitSet& set = by_rank[rank];
      if (queue.empty() || set.blocked) continue;
      const bool blocked = (queue.front().announcement->flags & DDL_FLAG_BLOCKING) != 0 &&
                           now - queue.front().since > kBlockedGraceSeconds;
      if (blocked) set = {{}, {}, true, 0};
      set.waits_in.push_back(name);
      set.since = std::max(set.since, queue.back().since);
    }
  }
  std::map<std::pair<bool, std::vector<std::string>>, size_t> places;
  std::vector<WaitSet> sets;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    WaitSet& own = by_rank[rank];
    if (own.waits_in.empty()) continue;
    const auto [at, is_new] = places.try_emplace({own.blocked, own.waits_in}, sets.size());
    if (is_new) sets.push_back(std::move(own));
    WaitSet& set = sets[at->second];
    if (!is_new) set.since = std::max(set.since, own.since);
    set.ranks.push_back(static_cast<int>(rank));
  }
  if (sets.size() > kMaxWaitSets) sets.resize(kMaxWaitSets);
  return sets;
}

void Coordinator::KeepDeadlocked(std::vector<WaitSet>* sets) const {
  const auto may_complete = [&](const std::string& name) {
    const Entry& entry = waiting_.at(name);
    return std::none_of(sets->begin(), sets->end(), [&](const WaitSet& other) {
      return entry.by_rank[static_cast<size_t>(other.ranks.front())].empty();
    });
  };
  const auto may_go_on = [&](const WaitSet& set) {
    return std::any_of(set.waits_in.begin(), set.waits_in.end(), may_complete);
  };
  for (auto at = sets->begin(); at != sets->end();) {
    if (may_go_on(*at)) {
      sets->erase(at);
      at = sets->begin();  // collectives that only it had not submitted may complete, too
    } else {
      ++at;
    }
  }
}

size_t Coordinator::NumWaiting(int rank) const {
  size_t count = 0;
  for (const auto& [name, entry] : waiting_) count += entry.by_rank[static_cast<size_t>(rank)].size();
  return count;
}

bool Coordinator::IsIdle(int rank, double now) {
  if (!PositionsKnown({rank}, now - kAskAgainSeconds, now)) return false;
  const PositionReport& report = position_reports_[static_cast<size_t>(rank)];
  // Otherwise a request that it has submitted has not arrived yet, or was decided and is running.
  return report.last && report.position.idle_s >= kIdleSeconds && report.position.pending == NumWaiting(rank);
}

void Coordinator::FailDeadlocked(double now) {
  if (now - deadlock_looked_at_ < kLookSeconds) return;
  deadlock_looked_at_ = now;
  const auto old = [&](const auto& named) { return now - named.second.since > kBlockedGraceSeconds; };
  if (std::count_if(waiting_.begin(), waiting_.end(), old) < 2) return;
  std::vector<WaitSet> sets = WaitSets(now);
  KeepDeadlocked(&sets);
  const auto proves_nothing = [&](WaitSet& set) {
    if (set.blocked) return false;
    if (now - set.since < kSettledSeconds) return true;
    for (size_t i = 0; i < std::min(set.ranks.size(), kMaxAskedPerSet); ++i) {
      if (!IsIdle(set.ranks[i], now) || now - set.since < kIdleSeconds) continue;
      std::swap(set.ranks.front(), set.ranks[i]);
      return false;
    }
    return true;
  };
  sets.erase(std::remove_if(sets.begin(), sets.end(), proves_nothing), sets.end());
  KeepDeadlocked(&sets);
  if (sets.empty()) return;
  std::string message;
  std::set<std::string> names;
  std::vector<bool> waits(static_cast<size_t>(size_), false);
  std::vector<int> named;
  for (WaitSet& set : sets) {
    std::sort(set.ranks.begin(), set.ranks.end());
    named.insert(named.end(), set.ranks.begin(), set.ranks.end());
    for (int rank : set.ranks) waits[static_cast<size_t>(rank)] = true;
    const Entry& entry = waiting_.at(set.waits_in.front());
    const auto& queue = entry.by_rank[static_cast<size_t>(set.ranks.front())];
    message += (message.empty() ? "the ranks run different collectives: rank(s) " : ", rank(s) ") +
               FormatRanks(set.ranks) + " in " + Label(*queue.front().announcement);
    if (set.waits_in.size() > 1) message += " (and " + std::to_string(set.waits_in.size() - 1) + " more)";
    names.insert(set.waits_in.begin(), set.waits_in.end());
  }
  message +=
      ". None of these can complete, because each waits for a rank that waits in another. Every rank must run the same "
      "script, build the same model and have as many batches.";
  // Ranks that wait in none of these collectives may still submit one. The others get their verdict now.
  ++num_failures_;
  for (const std::string& name : names) {
    const auto at = waiting_.find(name);
    std::vector<int> late;
    for (int rank : Missing(at->second)) {
      if (!waits[static_cast<size_t>(rank)]) late.push_back(rank);
    }
    Fail(at, {DDL_FAILED_PRECONDITION, message, InRole(DDL_RANK_NAMED, named)});
    AddTombstones(late, verdicts_.back().decision, now, num_failures_);
  }
}

}  // namespace ddl
