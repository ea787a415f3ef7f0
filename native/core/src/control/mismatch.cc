// DescribeMismatch: the report of a disagreement between ranks.
#include <set>
#include <string>
#include <vector>

#include "base/text.h"
#include "control/coordinator.h"
#include "control/terms.h"

namespace ddl {
namespace {

// The values of one term, each with its ranks, in the order of their lowest rank; empty: all are equal. `named`:
// receives the ranks in this order; may be NULL.
std::string Differences(const Term& term, const std::vector<Submission>& submissions, std::vector<int>* named) {
  std::vector<uint64_t> values;
  std::vector<std::string> texts;
  std::vector<std::vector<int>> ranks;
  for (const Submission& submission : submissions) {
    const Announcement& announcement = *submission.announcement;
    const uint64_t value = term.value(announcement);
    size_t i = 0;
    while (i < values.size() && values[i] != value) ++i;
    if (i == values.size()) {
      values.push_back(value);
      texts.push_back(term.text(announcement, announcement.detail));
      ranks.emplace_back();
    }
    ranks[i].push_back(submission.rank);
  }
  if (values.size() == 1) return {};
  std::string differences = std::string(term.name) + ": ";
  // Texts may be shortened.
  const bool texts_differ = std::set<std::string>(texts.begin(), texts.end()).size() == values.size();
  for (size_t i = 0; i < values.size(); ++i) {
    differences += (i > 0 ? ", " : "") + texts[i];
    if (!texts_differ) differences += " (" + std::to_string(values[i]) + ")";
    differences += " on rank(s) " + FormatRanks(ranks[i]);
    if (named != nullptr) named->insert(named->end(), ranks[i].begin(), ranks[i].end());
  }
  return differences;
}

}  // namespace

Status Mismatch(const std::vector<Submission>& submissions) {
  const Announcement& first = *submissions[0].announcement;
  const TermWords wanted = WordsOf(first);
  bool agree = true;
  const Announcement* compared = &first;  // many ranks share one
  for (const auto& [rank, announcement, step] : submissions) {
    if (announcement.get() == compared) continue;
    compared = announcement.get();
    agree = agree && WordsOf(*compared) == wanted;
  }
  if (agree) return {};
  std::string differences;
  std::vector<int> named;  // every rank, in the order of the first term that differs
  for (const Term& term : kTerms) {
    const bool is_first = differences.empty();
    const std::string more = Differences(term, submissions, is_first ? &named : nullptr);
    if (more.empty()) continue;
    differences += (is_first ? "" : "; ") + more;
    // Another collective under the same name: its other terms differ for that reason alone.
    if (&term == &kTerms[0]) break;
  }
  return {DDL_FAILED_PRECONDITION,
          "ranks disagree on '" + first.name + "': " + differences +
              ". All ranks must submit the same collective, of equal shape, dtype and op, under one name.",
          InRole(DDL_RANK_NAMED, named)};
}

}  // namespace ddl
