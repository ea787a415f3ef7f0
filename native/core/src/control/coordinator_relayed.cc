// What reaches the coordinator through others, and what it learns when one of them is stopped.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "control/coordinator.h"

namespace ddl {

void Coordinator::AnnounceAlike(AlikeAnnouncements alike, double now) {
  Announcement& a = alike.announcement;
  if (alike.id == 0 && a.kind == DDL_JOIN) {
    for (const int rank : alike.ranks) {
      if (!Drop(rank, "")) Join(rank);
    }
    return;
  }
  auto at = waiting_.end();
  std::shared_ptr<const Announcement> shared;
  uint64_t shared_rows = 0;
  if (alike.id != 0) shared = known_.At(alike.id);
  for (size_t i = 0; i < alike.ranks.size(); ++i) {
    if (alike.id == 0 && (shared == nullptr || shared_rows != alike.rows[i])) {
      shared_rows = a.rows = alike.rows[i];
      const uint32_t id = known_.IdOf(a);
      shared = id != 0 ? known_.At(id) : std::make_shared<const Announcement>(a);
    }
    if (Drop(alike.ranks[i], shared->name)) continue;
    const auto queued = Enqueue(alike.ranks[i], {shared, alike.steps[i], now});
    if (queued != waiting_.end()) at = queued;
  }
  // One more of each rank completes one collective at most.
  if (at != waiting_.end()) Match(at);
  FailSteps();
}

bool Coordinator::Drop(int rank, const std::string& name) {
  if (to_drop_.empty()) return false;
  const auto at = to_drop_.find({rank, name});
  if (at == to_drop_.end()) return false;
  if (--at->second == 0) to_drop_.erase(at);
  return true;
}

void Coordinator::OnUndecided(int rank, const Undecided& undecided, double now) {
  // Else a decision is on its way to this rank: it waits for less than it says.
  const auto concerned = [&](const Verdict& verdict) {
    return std::find(verdict.ranks.begin(), verdict.ranks.end(), rank) != verdict.ranks.end();
  };
  if (undecided.decisions != num_decided(rank) || std::any_of(verdicts_.begin(), verdicts_.end(), concerned)) return;
  bypassing_.erase(rank);
  // Of each name, those that have come are the oldest.
  std::map<std::string, size_t> came;
  for (const Announcement& a : undecided.announcements) {
    if (came.count(a.name) != 0) continue;
    const auto at = waiting_.find(a.name);
    const bool joined = a.kind == DDL_JOIN && joined_[static_cast<size_t>(rank)];
    came[a.name] = joined ? 1 : at == waiting_.end() ? 0 : at->second.by_rank[static_cast<size_t>(rank)].size();
  }
  for (const Announcement& a : undecided.announcements) {
    size_t& left = came[a.name];
    if (left > 0) {
      --left;
      continue;
    }
    bypassing_.insert(rank);
    ++to_drop_[{rank, a.name}];
    Announce(rank, a, now);
  }
}

}  // namespace ddl
