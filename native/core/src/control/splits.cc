// Checks the splits of an all_to_all, and tells each rank how many rows it receives. Only the coordinator knows every
// rank's splits.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "control/coordinator.h"

namespace ddl {

bool SplitsAreValid(const int64_t* splits, size_t num_splits, uint64_t rows) {
  uint64_t left = rows;  // counted down, because a sum of wrong splits may overflow 64 bits
  for (size_t i = 0; i < num_splits; ++i) {
    if (splits[i] < 0 || static_cast<uint64_t>(splits[i]) > left) return false;
    left -= static_cast<uint64_t>(splits[i]);
  }
  return left == 0;
}

Status WrongSplits(const std::vector<Submission>& submissions) {
  std::string wrong;
  FailedRanks ranks;
  for (const Submission& submission : submissions) {
    const Announcement& a = *submission.announcement;
    if (SplitsAreValid(a.splits.data(), a.splits.size(), a.rows)) continue;
    wrong += (wrong.empty() ? "" : "; ") + std::to_string(a.rows) + " rows in splits of";
    for (size_t to = 0; to < a.splits.size(); ++to) wrong += (to == 0 ? " " : ", ") + std::to_string(a.splits[to]);
    wrong += " on rank " + std::to_string(submission.rank);
    ranks.push_back({submission.rank, DDL_RANK_NAMED});
  }
  if (wrong.empty()) return {};
  return {DDL_INVALID_ARGUMENT,
          Label(*submissions[0].announcement) +
              ": the splits of every rank must be 0 or more and add up to its rows; without splits, the rows must be a "
              "multiple of the number of ranks (" +
              std::to_string(submissions.size()) + "). Received: " + wrong + ".",
          std::move(ranks)};
}

std::vector<Verdict> AllToAllVerdicts(const Decision& decision, const std::vector<Submission>& submissions) {
  std::vector<Verdict> verdicts;
  for (auto to = submissions.rbegin(); to != submissions.rend(); ++to) {
    Verdict verdict{decision, {to->rank}};
    for (const Submission& from : submissions) {
      verdict.decision.rows.push_back(static_cast<uint64_t>(from.announcement->splits[static_cast<size_t>(to->rank)]));
    }
    verdicts.push_back(std::move(verdict));
  }
  return verdicts;
}

}  // namespace ddl
