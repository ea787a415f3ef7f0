// The coordinator's handling of missing ranks: which ranks it asks, what it reports, and when it fails a collective.
#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "control/coordinator.h"

namespace ddl {
namespace {

// How long a rank may take to report its position, and how long the report stays valid.
constexpr double kReportTimeoutSeconds = 2.0;
constexpr double kReportLifetimeSeconds = 5.0;
// Positions of more ranks than this would add nothing.
constexpr size_t kMaxQueried = 8;

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f s", seconds);
  return text;
}

std::string DescribeJoined(const std::vector<int>& joined) {
  return joined.empty() ? "" : " Rank(s) " + FormatRanks(joined) + " have joined and are not waited for.";
}

std::vector<int> RanksToQuery(std::vector<int> ranks) {
  ranks.resize(std::min(ranks.size(), kMaxQueried));
  return ranks;
}

}  // namespace

void Coordinator::Tick(double now) {
  FailDeadlocked(now);
  // Collectives that wait for the same ranks share one warning: the oldest, and how many more.
  struct Late {
    std::string label;
    double age;
    int others;
    std::vector<int> present;
  };
  std::map<std::vector<int>, Late> late;
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const auto here = at++;
    Entry& entry = here->second;
    const auto fails_at = [&](double age) { return deadline_s_ > 0 && age > deadline_s_; };
    const auto warns_at = [&](double age) {
      return warn_after_s_ > 0 && age > std::max(warn_after_s_, entry.warn_age);
    };
    if (!fails_at(now - entry.since) && !warns_at(now - entry.since)) continue;
    const std::vector<int> present = Present(entry);
    double since = now;
    for (int rank : present) since = std::min(since, entry.by_rank[static_cast<size_t>(rank)].front().since);
    entry.since = since;
    const double age = now - since;
    const bool fails = fails_at(age);
    if (!fails && !warns_at(age)) continue;
    const std::vector<int> missing = Missing(entry);
    if (!PositionsKnown(missing, since, now)) continue;
    const std::string label = Label(Any(entry));
    if (fails) {
      Fail(here, {DDL_DEADLINE_EXCEEDED,
                  label + " waited " + Seconds(age) + " for rank(s) " + FormatRanks(missing) + "; rank(s) " +
                      FormatRanks(present) + " had arrived." + DescribeJoined(Joined()) + DescribePositions(missing) +
                      " Every rank must run the same collectives. If the missing ranks are only slow, raise "
                      "KERAS_DDL_DEADLINE_SECONDS.",
                  InRole(DDL_RANK_NAMED, missing)});
      AddTombstones(missing, verdicts_.back().decision, now, ++num_failures_);
      continue;
    }
    // Each warning comes at twice the age of the previous one.
    entry.warn_age = 2 * age;
    const auto [group, is_new] = late.try_emplace(missing, Late{label, age, 0, present});
    if (is_new) continue;
    Late& oldest = group->second;
    const int others = oldest.others + 1;
    if (age > oldest.age) oldest = {label, age, others, present};
    oldest.others = others;
  }
  FailSteps();
  for (const auto& [missing, it] : late) {
    warnings_.push_back(it.label + (it.others > 0 ? " (and " + std::to_string(it.others) + " more)" : "") +
                        " has waited " + Seconds(it.age) + " for rank(s) " + FormatRanks(missing) + "; rank(s) " +
                        FormatRanks(it.present) + " have arrived." + DescribeJoined(Joined()) +
                        DescribePositions(missing) +
                        (deadline_s_ > 0 ? " It fails after " + Seconds(deadline_s_) + "." : ""));
  }
}

bool Coordinator::PositionsKnown(const std::vector<int>& ranks, double since, double now) {
  bool all = true;
  for (int rank : RanksToQuery(ranks)) {
    PositionReport& report = position_reports_[static_cast<size_t>(rank)];
    if (report.asked < since || now - report.asked > kReportLifetimeSeconds) {
      report = {};
      report.asked = now;
      position_queries_.push_back(rank);
    }
    all = all && (report.last || now - report.asked > kReportTimeoutSeconds);
  }
  return all;
}

void Coordinator::OnPositionReport(int rank, const std::string& text, bool last) {
  PositionReport& report = position_reports_[static_cast<size_t>(rank)];
  report.lives = true;
  if (!last) return;
  report.last = true;
  report.position = Position::Decode(text);
}

std::string Coordinator::DescribePositions(const std::vector<int>& ranks) const {
  std::string text;
  for (int rank : RanksToQuery(ranks)) {
    const PositionReport& report = position_reports_[static_cast<size_t>(rank)];
    const std::string problem = locations_.ProcessProblem(rank);
    std::vector<std::string> facts;
    if (!problem.empty()) {
      facts.push_back(problem);
    } else if (!report.lives) {
      facts.emplace_back("shows no sign of life: it is stopped or overloaded, or its host is unreachable");
    } else if (!report.last) {
      facts.emplace_back("is alive, but its Python does not answer: some library holds the interpreter lock");
    } else if (!report.position.where.empty()) {
      facts.push_back("is at " + report.position.where);
    }
    // The collective in which it waits instead; if its main thread waits in one, that one.
    const Announcement* elsewhere = nullptr;
    for (const auto& [name, entry] : waiting_) {
      const auto& queue = entry.by_rank[static_cast<size_t>(rank)];
      if (queue.empty()) continue;
      const Announcement& a = *queue.front().announcement;
      if (elsewhere == nullptr || (a.flags & DDL_FLAG_BLOCKING) != 0) elsewhere = &a;
    }
    if (elsewhere != nullptr) facts.push_back("waits in " + Label(*elsewhere));
    std::string sentence = locations_.Describe(rank);
    sentence[0] = 'R';
    for (size_t i = 0; i < facts.size(); ++i) sentence += (i > 0 ? " and " : " ") + facts[i];
    text += " " + sentence + (facts.empty() ? " is alive." : ".");
  }
  return text;
}

std::vector<int> Coordinator::TakePositionQueries() { return std::exchange(position_queries_, {}); }

}  // namespace ddl
