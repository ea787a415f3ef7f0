// What the coordinator does about silence: who is asked, what is said, and when a collective is given up.
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

// Two ranks blocked in differently named collectives this long cannot meet any more; the pause only lets a rank that
// is between two calls from other threads arrive.
constexpr double kBlockedGraceSeconds = 1.0;
// How long a rank that was asked where it is may take to answer, and for how long the answer is news.
constexpr double kAnswerSeconds = 2.0;
constexpr double kNewsSeconds = 5.0;
// Of more missing ranks than this the others say nothing new.
constexpr size_t kMostAsked = 8;

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f s", seconds);
  return text;
}

std::string NotWaitedFor(const std::vector<int>& joined) {
  return joined.empty() ? "" : " Rank(s) " + JoinRanks(joined) + " have joined and are not waited for.";
}

std::vector<int> Asked(std::vector<int> ranks) {
  ranks.resize(std::min(ranks.size(), kMostAsked));
  return ranks;
}

}  // namespace

void Coordinator::Tick(double now) {
  CheckBlocked(now);
  // What waits for the same ranks is told in one warning: the oldest, and how many more.
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
    const std::vector<int> present = Present(entry);
    double since = now;
    for (int rank : present) since = std::min(since, entry.by_rank[static_cast<size_t>(rank)].front().since);
    const double age = now - since;
    const bool fails = deadline_s_ > 0 && age > deadline_s_;
    const bool warns = warn_after_s_ > 0 && age > std::max(warn_after_s_, entry.warn_age);
    if (!fails && !warns) continue;
    const std::vector<int> missing = Missing(entry);
    if (!Sought(missing, since, now)) continue;
    const std::string label = Label(entry.by_rank[static_cast<size_t>(present[0])].front().announcement);
    if (fails) {
      Fail(here, DDL_DEADLINE_EXCEEDED,
           label + " waited " + Seconds(age) + " for rank(s) " + JoinRanks(missing) + "; rank(s) " +
               JoinRanks(present) + " had come." + NotWaitedFor(Joined()) + Sightings(missing) +
               " Every rank must run the same collectives. If the missing ranks are only slow, raise "
               "KERAS_DDL_DEADLINE_SECONDS.");
      AddTombstones(missing, verdicts_.back().decision, now, "");
      continue;
    }
    // Each warning comes after twice the time of the one before.
    entry.warn_age = 2 * age;
    const auto [told, first] = late.try_emplace(missing, Late{label, age, 0, present});
    if (first) continue;
    const int others = told->second.others + 1;
    if (age > told->second.age) told->second = {label, age, others, present};
    told->second.others = others;
  }
  FailSteps();
  for (const auto& [missing, it] : late) {
    warnings_.push_back(it.label + (it.others > 0 ? " (and " + std::to_string(it.others) + " more)" : "") +
                        " has waited " + Seconds(it.age) + " for rank(s) " + JoinRanks(missing) + "; rank(s) " +
                        JoinRanks(it.present) + " have come." + NotWaitedFor(Joined()) + Sightings(missing) +
                        (deadline_s_ > 0 ? " It fails after " + Seconds(deadline_s_) + "." : ""));
  }
}

bool Coordinator::Sought(const std::vector<int>& ranks, double since, double now) {
  bool all = true;
  for (int rank : Asked(ranks)) {
    Sighting& sighting = sightings_[static_cast<size_t>(rank)];
    if (sighting.asked < since || now - sighting.asked > kNewsSeconds) {
      sighting = {};
      sighting.asked = now;
      questions_.push_back(rank);
    }
    all = all && (sighting.last || now - sighting.asked > kAnswerSeconds);
  }
  return all;
}

void Coordinator::Hear(int rank, const std::string& predicate, bool last) {
  Sighting& sighting = sightings_[static_cast<size_t>(rank)];
  sighting.lives = true;
  if (!last) return;
  sighting.last = true;
  sighting.predicate = predicate;
}

std::string Coordinator::Sightings(const std::vector<int>& ranks) const {
  std::string text;
  for (int rank : Asked(ranks)) {
    const Sighting& sighting = sightings_[static_cast<size_t>(rank)];
    const std::string trouble = places_.Trouble(rank);
    std::vector<std::string> facts;
    if (!trouble.empty()) {
      facts.push_back(trouble);
    } else if (!sighting.lives) {
      facts.emplace_back("gives no sign of life: it is stopped or overloaded, or its host unreachable");
    } else if (!sighting.last) {
      facts.emplace_back("lives, but its Python does not answer: some library keeps the interpreter's lock");
    } else if (!sighting.predicate.empty()) {
      facts.push_back(sighting.predicate);
    }
    // In what it waits instead: where its main thread is, if it waits there.
    const Announcement* elsewhere = nullptr;
    for (const auto& [name, entry] : waiting_) {
      const auto& queue = entry.by_rank[static_cast<size_t>(rank)];
      if (queue.empty()) continue;
      const Announcement& a = queue.front().announcement;
      if (elsewhere == nullptr || (a.flags & DDL_FLAG_BLOCKING) != 0) elsewhere = &a;
    }
    if (elsewhere != nullptr) facts.push_back("waits in " + Label(*elsewhere));
    std::string sentence = places_.Of(rank);
    sentence[0] = 'R';
    for (size_t i = 0; i < facts.size(); ++i) sentence += (i > 0 ? " and " : " ") + facts[i];
    text += " " + sentence + (facts.empty() ? " lives." : ".");
  }
  return text;
}

std::vector<int> Coordinator::TakeQuestions() { return std::exchange(questions_, {}); }

void Coordinator::CheckBlocked(double now) {
  // The collective in which each rank's main thread is blocked; a rank has at most one.
  std::vector<Entries::iterator> blocked(static_cast<size_t>(size_), waiting_.end());
  for (auto at = waiting_.begin(); at != waiting_.end(); ++at) {
    for (size_t rank = 0; rank < blocked.size(); ++rank) {
      const auto& queue = at->second.by_rank[rank];
      if (!queue.empty() && (queue.front().announcement.flags & DDL_FLAG_BLOCKING) != 0 &&
          now - queue.front().since > kBlockedGraceSeconds) {
        blocked[rank] = at;
      }
    }
  }
  for (size_t a = 0; a < blocked.size(); ++a) {
    for (size_t b = a + 1; b < blocked.size(); ++b) {
      if (blocked[a] == waiting_.end() || blocked[b] == waiting_.end() || blocked[a] == blocked[b]) continue;
      // Each waits for the other: neither can arrive.
      const auto& at_a = blocked[a]->second.by_rank;
      const auto& at_b = blocked[b]->second.by_rank;
      if (!at_a[b].empty() || !at_b[a].empty()) continue;
      const std::string message = "the ranks run different collectives: rank " + std::to_string(a) + " waits in " +
                                  Label(at_a[a].front().announcement) + ", rank " + std::to_string(b) + " in " +
                                  Label(at_b[b].front().announcement) +
                                  ". Every rank must run the same script and build the same model.";
      const auto first = blocked[a];
      const auto second = blocked[b];
      // Ranks that are in neither may still come to one of them; those in the other have their answer.
      std::vector<int> neither;
      for (int rank : Missing(first->second)) {
        if (second->second.by_rank[static_cast<size_t>(rank)].empty()) neither.push_back(rank);
      }
      const std::string first_name = first->first;
      const std::string second_name = second->first;
      Fail(first, DDL_FAILED_PRECONDITION, message);
      AddTombstones(neither, verdicts_.back().decision, now, second_name);
      Fail(second, DDL_FAILED_PRECONDITION, message);
      AddTombstones(neither, verdicts_.back().decision, now, first_name);
      return;  // iterators may be gone; the next tick sees the rest
    }
  }
}

}  // namespace ddl
