#include "control/coordinator.h"

#include <algorithm>
#include <utility>

#include "common/hash.h"
#include "kernels/kernels.h"

namespace ddl {
namespace {

constexpr double kTombstoneSeconds = 60.0;
// How long the threads of a cancelled step may still submit the rest of it.
constexpr double kFailedStepSeconds = 10.0;
// How many collectives that came once are remembered.
constexpr size_t kMaxSeen = 65536;

}  // namespace

std::string Label(const Announcement& a) {
  return std::string(KindName(static_cast<ddl_kind>(a.kind))) + (a.name.empty() ? "" : " '" + a.name + "'") +
         (a.detail.empty() ? "" : " (" + a.detail + ")");
}

Status HasLeft(const Announcement& a, int rank, const RankLocations& locations) {
  const bool joins = a.kind == DDL_JOIN;
  return {DDL_UNAVAILABLE,
          Label(a) + " cannot complete: rank " + std::to_string(rank) + " has left " +
              (joins ? "without joining " : "") + "(its process on host " + locations.at(rank).host +
              " ended or called shutdown). Every rank must " + (joins ? "join" : "run the same collectives") +
              "; look at the output of that rank.",
          {{rank, DDL_RANK_LEFT}}};
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
  const uint64_t step = announcement.step;
  if (const uint32_t id = known_.IdOf(announcement); id != 0) {
    AnnounceKnown(rank, id, step, now);
    return;
  }
  Wait(rank, {std::make_shared<const Announcement>(std::move(announcement)), step, now});
}

void Coordinator::AnnounceKnown(int rank, uint32_t id, uint64_t step, double now) {
  Wait(rank, {known_.At(id), step, now});
}

void Coordinator::Wait(int rank, Waiting waiting) {
  const std::string& name = waiting.announcement->name;
  if (FailIfCancelled(rank, *waiting.announcement) || FailByTombstone(rank, name, waiting.step, waiting.since) ||
      FailIfStepFailed(rank, name, waiting.step)) {
    FailSteps();
    return;
  }
  const auto at = waiting_.try_emplace(name).first;
  Entry& entry = at->second;
  if (entry.by_rank.empty()) {
    entry.by_rank.resize(static_cast<size_t>(size_));
    entry.missing = size_ - num_joined_;
    entry.since = waiting.since;
  }
  auto& queue = entry.by_rank[static_cast<size_t>(rank)];
  if (queue.empty()) {
    ++entry.present;
    --entry.missing;
  }
  queue.push_back(std::move(waiting));
  ++ranks_looked_at_;
  Match(at);
  FailSteps();
}

Coordinator::Waiting Coordinator::Take(Entry& entry, int rank) {
  auto& queue = entry.by_rank[static_cast<size_t>(rank)];
  Waiting oldest = std::move(queue.front());
  queue.pop_front();
  if (queue.empty()) {
    --entry.present;
    if (!joined_[static_cast<size_t>(rank)]) ++entry.missing;
  }
  return oldest;
}

void Coordinator::Match(Entries::iterator at) {
  Entry& entry = at->second;
  for (int rank : ranks_left_) {
    if (!entry.by_rank[static_cast<size_t>(rank)].empty()) continue;
    Fail(at, HasLeft(Any(entry), rank, locations_));
    return;
  }
  if (entry.missing > 0) return;
  std::vector<Submission> all;
  std::vector<int> joined;
  ranks_looked_at_ += static_cast<uint64_t>(size_);
  for (int rank = 0; rank < size_; ++rank) {
    if (entry.by_rank[static_cast<size_t>(rank)].empty()) {
      joined.push_back(rank);
      continue;
    }
    Waiting waiting = Take(entry, rank);
    all.push_back({rank, std::move(waiting.announcement), waiting.step});
  }
  Verdict verdict;
  Decision& decision = verdict.decision;
  for (const Submission& submission : all) verdict.ranks.push_back(submission.rank);
  decision.name = at->first;
  Status problem = Mismatch(all);
  const Announcement& first = *all[0].announcement;
  const uint32_t kind = first.kind;
  if ((first.flags & DDL_FLAG_RESUMES) != 0) cancelling_ = false;
  if (problem.ok()) problem = MissingData(joined, all);
  if (problem.ok() && kind == DDL_ALL_TO_ALL) problem = WrongSplits(all);
  decision.SetFailure(problem);
  if (problem.ok()) {
    if (kind == DDL_ALL_GATHER) {
      decision.rows.resize(static_cast<size_t>(size_), 0);
      for (const Submission& each : all) decision.rows[static_cast<size_t>(each.rank)] = each.announcement->rows;
    }
    if (joined.empty()) {
      AssignId(all, &decision);
    } else {
      verdict.ranks.insert(verdict.ranks.end(), joined.begin(), joined.end());
      decision.joined.assign(joined.begin(), joined.end());
      decision.submitted = first;
    }
  }
  if (decision.code == DDL_OK && kind == DDL_ALL_TO_ALL) {
    for (Verdict& each : AllToAllVerdicts(decision, all)) verdicts_.push_back(std::move(each));
  } else {
    verdicts_.push_back(verdict);
  }
  entry.warn_age = 0;
  if (entry.present == 0) waiting_.erase(at);
  if (decision.code == DDL_OK) return;
  for (const Submission& each : all) failing_.push_back({each.rank, each.step, decision});
}

void Coordinator::AssignId(const std::vector<Submission>& all, Decision* decision) {
  const Announcement& first = *all[0].announcement;
  decision->id = known_.IdOf(first);
  if (decision->id != 0) {
    const auto known = known_.At(decision->id);
    const bool by_all =
        std::all_of(all.begin(), all.end(), [&](const Submission& s) { return s.announcement == known; });
    if (!by_all) decision->id = 0;
    return;
  }
  if (!first.splits.empty() || known_.full()) return;
  const std::string contents = ContentsOf(first);
  const Announcement* alike = &first;  // many ranks share one
  for (const Submission& each : all) {
    if (each.announcement.get() == alike) continue;
    alike = each.announcement.get();
    if (ContentsOf(*alike) != contents) return;
  }
  if (seen_.size() >= kMaxSeen) seen_.clear();
  if (seen_.insert(Hash(contents)).second) return;
  decision->id = known_.Add(first);
  decision->gives_id = true;
}

void Coordinator::Fail(Entries::iterator at, const Status& status) {
  // If ranks cannot recover together, everything else fails on its own.
  if ((Any(at->second).flags & kOfFailure) != 0) cancelling_ = false;
  Verdict verdict;
  verdict.decision.name = at->first;
  verdict.decision.SetFailure(status);
  verdict.ranks = Present(at->second);
  std::vector<uint64_t> steps;
  for (int rank : verdict.ranks) steps.push_back(Take(at->second, rank).step);
  verdicts_.push_back(verdict);
  at->second.warn_age = 0;
  if (at->second.present == 0) waiting_.erase(at);
  for (size_t i = 0; i < steps.size(); ++i) failing_.push_back({verdict.ranks[i], steps[i], verdict.decision});
}

void Coordinator::AddTombstones(const std::vector<int>& late, const Decision& decision, double now, uint64_t failure) {
  for (int rank : late) {
    if (left_[static_cast<size_t>(rank)]) continue;
    tombstones_[decision.name].push_back({rank, now + std::max(kTombstoneSeconds, deadline_s_), decision, failure});
  }
}

bool Coordinator::FailByTombstone(int rank, const std::string& name, uint64_t step, double now) {
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
    const uint64_t failure = tombstone->failure;
    verdicts_.push_back({tombstone->decision, {rank}});
    failing_.push_back({rank, step, tombstone->decision});
    tombstones.erase(tombstone);
    for (auto each = tombstones_.begin(); each != tombstones_.end();) {
      const auto here = each++;
      auto& list = here->second;
      list.erase(std::remove_if(list.begin(), list.end(),
                                [&](const Tombstone& t) { return t.rank == rank && t.failure == failure; }),
                 list.end());
      if (list.empty()) tombstones_.erase(here);
    }
  } else if (tombstones.empty()) {
    tombstones_.erase(at);
  }
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
  ranks_left_.insert(rank);
  if (joined_[static_cast<size_t>(rank)]) {
    joined_[static_cast<size_t>(rank)] = false;
    --num_joined_;
    for (auto& [name, entry] : waiting_) entry.missing += entry.by_rank[static_cast<size_t>(rank)].empty() ? 1 : 0;
  }
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
  ranks_looked_at_ += static_cast<uint64_t>(size_);
  for (int r = 0; r < size_; ++r) {
    const auto rank = static_cast<size_t>(r);
    if (entry.by_rank[rank].empty() && !joined_[rank]) ranks.push_back(r);
  }
  return ranks;
}

std::vector<int> Coordinator::Present(const Entry& entry) const {
  std::vector<int> ranks;
  ranks_looked_at_ += static_cast<uint64_t>(size_);
  for (int r = 0; r < size_; ++r) {
    if (!entry.by_rank[static_cast<size_t>(r)].empty()) ranks.push_back(r);
  }
  return ranks;
}

const Announcement& Coordinator::Any(const Entry& entry) const {
  const auto submitted = [](const auto& queue) { return !queue.empty(); };
  return *std::find_if(entry.by_rank.begin(), entry.by_rank.end(), submitted)->front().announcement;
}

std::vector<Verdict> Coordinator::TakeVerdicts() { return std::exchange(verdicts_, {}); }
std::vector<std::string> Coordinator::TakeWarnings() { return std::exchange(warnings_, {}); }

}  // namespace ddl
