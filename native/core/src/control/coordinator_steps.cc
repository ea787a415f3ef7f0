// Fails the other collectives of a graph's run when one of them fails, and all collectives when a rank fails.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "control/coordinator.h"

namespace ddl {
namespace {

// Runs of graphs that overlap on one rank are few, and a cancelled one ends soon.
constexpr size_t kMaxFailedSteps = 256;

Decision Consequence(const std::string& name, const Decision& cause) {
  Decision decision = cause;
  decision.name = name;
  decision.message =
      "'" + name + "' was cancelled because '" + cause.name + "' of the same step failed: " + cause.message;
  return decision;
}

Decision Cancellation(const std::string& name) {
  Decision decision;
  decision.code = DDL_CANCELLED;
  decision.name = name;
  decision.message = "'" + name + "' was cancelled, because another rank has failed in this step";
  return decision;
}

}  // namespace

void Coordinator::FailSteps() {
  for (FailedStep& failing : std::exchange(failing_, {})) {
    if (failing.step == 0) continue;
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      const auto here = at++;
      const auto& queue = here->second.by_rank[static_cast<size_t>(failing.rank)];
      ++ranks_looked_at_;
      while (!queue.empty() && queue.front().step == failing.step) {
        verdicts_.push_back({Consequence(here->first, failing.cause), {failing.rank}});
        Take(here->second, failing.rank);
      }
      if (here->second.present == 0) waiting_.erase(here);
    }
    const std::pair<int, uint64_t> key(failing.rank, failing.step);
    if (failed_steps_.emplace(key, std::move(failing.cause)).second) failed_order_.push_back(key);
    ++num_failed_steps_;
    if (failed_order_.size() <= std::max(kMaxFailedSteps, 4 * static_cast<size_t>(size_))) continue;
    failed_steps_.erase(failed_order_.front());
    failed_order_.pop_front();
  }
}

bool Coordinator::FailIfStepFailed(int rank, const std::string& name, uint64_t step) {
  if (step == 0 || failed_steps_.empty()) return false;
  // A verdict is for the oldest request of its name, so a waiting request of another step must be left alone.
  const auto at = waiting_.find(name);
  if (at != waiting_.end() && !at->second.by_rank[static_cast<size_t>(rank)].empty()) return false;
  const auto failed = failed_steps_.find({rank, step});
  if (failed == failed_steps_.end()) return false;
  verdicts_.push_back({Consequence(name, failed->second), {rank}});
  return true;
}

bool Coordinator::FailIfCancelled(int rank, const Announcement& announcement) {
  if ((announcement.flags & DDL_FLAG_CANCELS) != 0 && !cancelling_) {
    cancelling_ = true;
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      const auto here = at++;
      Entry& entry = here->second;
      if ((Any(entry).flags & kOfFailure) != 0) continue;
      while (entry.present > 0) {
        const std::vector<int> ranks = Present(entry);
        for (const int each : ranks) Take(entry, each);
        verdicts_.push_back({Cancellation(here->first), ranks});
      }
      waiting_.erase(here);
    }
  }
  if (!cancelling_ || (announcement.flags & kOfFailure) != 0) return false;
  verdicts_.push_back({Cancellation(announcement.name), {rank}});
  return true;
}

}  // namespace ddl
