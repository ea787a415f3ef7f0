// Fails the other collectives of a graph's run when one of them fails.
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
  Decision decision;
  decision.code = cause.code;
  decision.name = name;
  decision.message =
      "'" + name + "' was cancelled because '" + cause.name + "' of the same step failed: " + cause.message;
  return decision;
}

}  // namespace

void Coordinator::FailSteps() {
  for (FailedStep& failing : std::exchange(failing_, {})) {
    if (failing.step == 0) continue;
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      const auto here = at++;
      auto& queue = here->second.by_rank[static_cast<size_t>(failing.rank)];
      while (!queue.empty() && queue.front().announcement.step == failing.step) {
        verdicts_.push_back({Consequence(here->first, failing.cause), {failing.rank}});
        queue.pop_front();
      }
      if (Present(here->second).empty()) waiting_.erase(here);
    }
    failed_steps_.push_back(std::move(failing));
    ++num_failed_steps_;
    if (failed_steps_.size() > std::max(kMaxFailedSteps, 4 * static_cast<size_t>(size_))) failed_steps_.pop_front();
  }
}

bool Coordinator::FailIfStepFailed(int rank, const Announcement& announcement) {
  if (announcement.step == 0) return false;
  // A verdict is for the oldest request of its name: one of another step that still waits must be left alone.
  const auto at = waiting_.find(announcement.name);
  if (at != waiting_.end() && !at->second.by_rank[static_cast<size_t>(rank)].empty()) return false;
  const auto failed = std::find_if(failed_steps_.begin(), failed_steps_.end(),
                                   [&](const FailedStep& f) { return f.rank == rank && f.step == announcement.step; });
  if (failed == failed_steps_.end()) return false;
  verdicts_.push_back({Consequence(announcement.name, failed->cause), {rank}});
  return true;
}

}  // namespace ddl
