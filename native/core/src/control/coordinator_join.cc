// Ranks that have joined: they submit nothing more until all have joined, and nothing waits for them.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "control/coordinator.h"

namespace ddl {

void Coordinator::Join(int rank) {
  joined_[static_cast<size_t>(rank)] = true;
  ++num_joined_;
  for (auto& [name, entry] : waiting_) entry.missing -= entry.by_rank[static_cast<size_t>(rank)].empty() ? 1 : 0;
  last_joined_ = rank;
  MatchAll();  // collectives that waited only for this rank
  EndJoins();
}

void Coordinator::EndJoins() {
  if (num_joined_ == 0 || (ranks_left_.empty() && num_joined_ < size_)) return;
  Verdict verdict;
  verdict.ranks = Joined();
  if (!ranks_left_.empty()) {
    const int rank = *ranks_left_.begin();
    Announcement join;
    join.kind = DDL_JOIN;
    verdict.decision.SetFailure(HasLeft(join, rank, locations_));
  } else {
    verdict.decision.last_joined = last_joined_;
    tombstones_.clear();  // no rank can still submit what failed before
  }
  joined_.assign(joined_.size(), false);
  num_joined_ = 0;
  for (auto& [name, entry] : waiting_) entry.missing = size_ - entry.present;
  verdicts_.push_back(std::move(verdict));
}

std::vector<int> Coordinator::Joined() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (joined_[static_cast<size_t>(rank)]) ranks.push_back(rank);
  }
  return ranks;
}

Status Coordinator::MissingData(const std::vector<int>& joined, const std::vector<Submission>& submissions) {
  if (joined.empty()) return {};
  const Announcement& a = *submissions[0].announcement;
  const bool rootless = a.kind == DDL_BROADCAST && std::find(joined.begin(), joined.end(), a.root) != joined.end();
  const bool needs_all = std::any_of(submissions.begin(), submissions.end(), [](const Submission& submission) {
    const Announcement& own = *submission.announcement;
    return own.kind == DDL_ALL_TO_ALL || (own.kind == DDL_ALL_REDUCE && own.op == DDL_ADASUM) ||
           (own.flags & DDL_FLAG_ALL_RANKS) != 0;
  });
  if (!rootless && !needs_all) return {};
  return {DDL_FAILED_PRECONDITION,
          Label(a) + " cannot run, because it needs the data of " +
              (needs_all ? "every rank" : "its root, rank " + std::to_string(a.root)) + ", and rank(s) " +
              FormatRanks(joined) +
              " have joined: they have no more data. Call it before any rank joins, or after all have.",
          InRole(DDL_RANK_NAMED, joined)};
}

}  // namespace ddl
