#include "control/coordinator.h"

#include <algorithm>
#include <utility>

#include "kernels/kernels.h"

namespace ddl {
namespace {

constexpr double kTombstoneSeconds = 60.0;
// How long the threads of a cancelled step may still submit the rest of it.
constexpr double kFailedStepSeconds = 10.0;

}  // namespace

std::string Label(const Announcement& a) {
  return std::string(KindName(static_cast<ddl_kind>(a.kind))) + (a.name.empty() ? "" : " '" + a.name + "'") +
         (a.detail.empty() ? "" : " (" + a.detail + ")");
}

Coordinator::Coordinator(const RankLocations& locations, double warn_after_s, double deadline_s)
    : locations_(locations),
      size_(locations.size()),
      warn_after_s_(warn_after_s),
      deadline_s_(deadline_s),
      left_(static_cast<size_t>(size_), false),
      joined_(static_cast<size_t>(size_), false),
      position_reports_(static_cast<size_t>(size_)) {}

void Coordinator::Announce(int rank, Announcement announcement, double now) {
  if (announcement.kind == DDL_JOIN) {
    Join(rank);
    return;
  }
  const std::string name = announcement.name;
  if (FailByTombstone(rank, announcement, now) || FailIfStepFailed(rank, announcement)) {
    FailSteps();
    return;
  }
  const auto at = waiting_.try_emplace(name).first;
  if (at->second.by_rank.empty()) at->second.by_rank.resize(static_cast<size_t>(size_));
  at->second.by_rank[static_cast<size_t>(rank)].push_back({std::move(announcement), now});
  Match(at);
  FailSteps();
}

void Coordinator::Match(Entries::iterator at) {
  Entry& entry = at->second;
  const std::vector<int> missing = Missing(entry);
  for (int rank : missing) {
    if (!left_[static_cast<size_t>(rank)]) continue;
    const std::vector<int> present = Present(entry);
    Fail(at, DDL_UNAVAILABLE,
         Label(entry.by_rank[static_cast<size_t>(present[0])].front().announcement) + " cannot complete: rank " +
             std::to_string(rank) + " has left (its process on host " + locations_.at(rank).host +
             " ended or called shutdown). Every rank must run the same collectives; look at "
             "the output of that rank.");
    return;
  }
  if (!missing.empty()) return;
  std::vector<Submission> all;
  std::vector<int> joined;
  for (int rank = 0; rank < size_; ++rank) {
    auto& queue = entry.by_rank[static_cast<size_t>(rank)];
    if (queue.empty()) {
      joined.push_back(rank);
      continue;
    }
    all.push_back({rank, std::move(queue.front().announcement)});
    queue.pop_front();
  }
  Verdict verdict;
  Decision& decision = verdict.decision;
  for (const Submission& submission : all) verdict.ranks.push_back(submission.rank);
  decision.name = at->first;
  decision.message = DescribeMismatch(all);
  const uint32_t kind = all[0].announcement.kind;
  if (decision.message.empty()) decision.message = DescribeMissingData(joined, all);
  if (decision.message.empty() && kind == DDL_ALL_TO_ALL) decision.message = DescribeWrongSplits(all);
  if (!decision.message.empty()) {
    decision.code = DDL_FAILED_PRECONDITION;
  } else {
    if (kind == DDL_ALL_GATHER) {
      decision.rows.resize(static_cast<size_t>(size_), 0);
      for (const auto& [rank, announcement] : all) decision.rows[static_cast<size_t>(rank)] = announcement.rows;
    }
    if (!joined.empty()) {
      verdict.ranks.insert(verdict.ranks.end(), joined.begin(), joined.end());
      decision.joined.assign(joined.begin(), joined.end());
      decision.submitted = all[0].announcement;
    }
  }
  if (decision.code == DDL_OK && kind == DDL_ALL_TO_ALL) {
    for (Verdict& each : AllToAllVerdicts(decision, all)) verdicts_.push_back(std::move(each));
  } else {
    verdicts_.push_back(verdict);
  }
  entry.warn_age = 0;
  if (Present(entry).empty()) waiting_.erase(at);
  if (decision.code == DDL_OK) return;
  for (const auto& [rank, announcement] : all) failing_.push_back({rank, announcement.step, decision});
}

void Coordinator::Fail(Entries::iterator at, ddl_code code, const std::string& message) {
  Verdict verdict;
  verdict.decision.code = code;
  verdict.decision.name = at->first;
  verdict.decision.message = message;
  verdict.ranks = Present(at->second);
  std::vector<uint64_t> steps;
  for (int rank : verdict.ranks) {
    auto& queue = at->second.by_rank[static_cast<size_t>(rank)];
    steps.push_back(queue.front().announcement.step);
    queue.pop_front();
  }
  verdicts_.push_back(verdict);
  at->second.warn_age = 0;
  if (Present(at->second).empty()) waiting_.erase(at);
  for (size_t i = 0; i < steps.size(); ++i) failing_.push_back({verdict.ranks[i], steps[i], verdict.decision});
}

void Coordinator::AddTombstones(const std::vector<int>& late, const Decision& decision, double now,
                                const std::string& other_name) {
  for (int rank : late) {
    if (left_[static_cast<size_t>(rank)]) continue;
    tombstones_[decision.name].push_back({rank, now + std::max(kTombstoneSeconds, deadline_s_), decision, other_name});
  }
}

bool Coordinator::FailByTombstone(int rank, const Announcement& announcement, double now) {
  const std::string& name = announcement.name;
  const auto at = tombstones_.find(name);
  if (at == tombstones_.end()) return false;
  auto& tombstones = at->second;
  tombstones.erase(
      std::remove_if(tombstones.begin(), tombstones.end(), [&](const Tombstone& t) { return t.until < now; }),
      tombstones.end());
  const auto tombstone =
      std::find_if(tombstones.begin(), tombstones.end(), [&](const Tombstone& t) { return t.rank == rank; });
  const bool failed = tombstone != tombstones.end();
  if (failed) {
    const std::string other_name = tombstone->other_name;
    verdicts_.push_back({tombstone->decision, {rank}});
    failing_.push_back({rank, announcement.step, tombstone->decision});
    tombstones.erase(tombstone);
    const auto other = tombstones_.find(other_name);
    if (other != tombstones_.end()) {
      auto& list = other->second;
      list.erase(std::remove_if(list.begin(), list.end(), [&](const Tombstone& t) { return t.rank == rank; }),
                 list.end());
      if (list.empty()) tombstones_.erase(other);
    }
  }
  if (tombstones_.count(name) != 0 && tombstones_[name].empty()) tombstones_.erase(name);
  return failed;
}

bool Coordinator::HasTombstones(double now) {
  if (num_failed_steps_ != num_failed_steps_seen_) {
    num_failed_steps_seen_ = num_failed_steps_;
    failed_steps_until_ = now + kFailedStepSeconds;
  }
  if (now < failed_steps_until_) return true;
  return std::any_of(tombstones_.begin(), tombstones_.end(), [&](const auto& named) {
    return std::any_of(named.second.begin(), named.second.end(), [&](const Tombstone& t) { return t.until >= now; });
  });
}

void Coordinator::Leave(int rank) {
  left_[static_cast<size_t>(rank)] = true;
  joined_[static_cast<size_t>(rank)] = false;
  MatchAll();
  EndJoins();
}

void Coordinator::MatchAll() {
  // Match decides one request per call and may erase the entry: start over until nothing changes.
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const auto here = at++;
    const std::string name = here->first;
    for (size_t before = verdicts_.size();; before = verdicts_.size()) {
      const auto again = waiting_.find(name);
      if (again == waiting_.end()) break;
      Match(again);
      if (verdicts_.size() == before) break;
    }
  }
  FailSteps();
}

std::vector<int> Coordinator::Missing(const Entry& entry) const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r) {
    const auto rank = static_cast<size_t>(r);
    if (entry.by_rank[rank].empty() && !joined_[rank]) ranks.push_back(r);
  }
  return ranks;
}

std::vector<int> Coordinator::Present(const Entry& entry) const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r) {
    if (!entry.by_rank[static_cast<size_t>(r)].empty()) ranks.push_back(r);
  }
  return ranks;
}

std::vector<Verdict> Coordinator::TakeVerdicts() { return std::exchange(verdicts_, {}); }
std::vector<std::string> Coordinator::TakeWarnings() { return std::exchange(warnings_, {}); }

}  // namespace ddl
