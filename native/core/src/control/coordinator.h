// The coordinator: rank 0's bookkeeping of which rank is ready for which collective, and which has joined, that is,
// waits for the end of all collectives and counts as ready for each until then. Pure logic: no threads, no I/O, no
// clock of its own (tests drive it directly).
#ifndef KERAS_DDL_CORE_CONTROL_COORDINATOR_H_
#define KERAS_DDL_CORE_CONTROL_COORDINATOR_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "control/message.h"
#include "liveness/places.h"

namespace ddl {

// What a rank has announced.
struct Submission {
  int rank;
  Announcement announcement;
};

// One decision and the ranks it is for. A failed collective may be for some ranks only: those that submitted it.
struct Verdict {
  Decision decision;
  std::vector<int> ranks;
};

class Coordinator {
 public:
  // `warn_after_s`, `deadline_s`: 0 for never. `places` must outlive this.
  Coordinator(const Places& places, double warn_after_s, double deadline_s);

  // Rank `rank` is ready, or joins. REQUIRES: it has not joined. `now`: seconds of a monotonic clock, never decreasing
  // between calls.
  void Announce(int rank, Announcement announcement, double now);
  // Rank `rank` leaves: whatever waits for it, now or later, fails with DDL_UNAVAILABLE.
  void Leave(int rank);
  // Looks at what has waited too long. Call it some times a second while anything is pending. Before it warns or
  // fails, it asks the missing ranks where they are and waits a moment for what they say.
  void Tick(double now);
  // The ranks to ask since the last call, each to be answered by Hear if it can.
  std::vector<int> TakeQuestions();
  // Rank `rank` lives. `last`: it says no more. `predicate`: as in "is at train.py:12 in step"; empty: not known.
  void Hear(int rank, const std::string& predicate, bool last);

  // True while some rank may still come to a collective that failed without it, or submit more of a failed step.
  bool HasTombstones(double now);
  bool HasLeft(int rank) const { return left_[static_cast<size_t>(rank)]; }
  // While this is true, what is submitted must come here: some rank takes part without submitting anything itself.
  bool AnyJoined() const { return !Joined().empty(); }

  // What was decided, in order, since the last call.
  std::vector<Verdict> TakeVerdicts();
  // Warnings for the user since the last call.
  std::vector<std::string> TakeWarnings();

 private:
  struct Waiting {
    Announcement announcement;
    double since;
  };
  struct Entry {
    std::vector<std::deque<Waiting>> by_rank;  // FIFO per rank
    double warn_age = 0;                       // age of the next warning; 0: none was given yet
  };
  // What a rank that was asked has said since.
  struct Sighting {
    double asked = -1e9;
    bool lives = false;
    bool last = false;
    std::string predicate;
  };
  // What is left of a collective that failed without this rank: until `until`, a late submission of it fails with the
  // original error. Of two collectives that failed together the rank can only have meant one: its submission of either
  // removes the tombstone of the other, named `other_name` (or empty).
  struct Tombstone {
    int rank;
    double until;
    Decision decision;
    std::string other_name;
  };
  // A run of a graph on one rank of which a collective has failed: the graph is cancelled there, and whether it still
  // submits its other collectives is chance. None of them can complete.
  struct FailedStep {
    int rank;
    uint64_t step;
    Decision cause;
  };
  using Entries = std::map<std::string, Entry>;

  void Match(Entries::iterator at);
  // Matches whatever has become complete or impossible. Entries may go.
  void MatchAll();
  // coordinator_join.cc.
  void Join(int rank);
  // When all ranks have joined, or one has left without: tells those that have.
  void EndJoins();
  std::vector<int> Joined() const;
  // Why a collective that ranks agree on can not run without `joined`; empty when it can.
  std::string WhyNotWithout(const std::vector<int>& joined, const std::vector<Submission>& submissions) const;
  void Fail(Entries::iterator at, ddl_code code, const std::string& message);
  // Each of `late` gets `decision` when it submits after all.
  void AddTombstones(const std::vector<int>& late, const Decision& decision, double now, const std::string& other_name);
  // coordinator_steps.cc. Fails what waits of the steps in failing_, from which on they are failed. Entries may go.
  void FailSteps();
  // Fails an announcement of a failed step.
  bool IsOfFailedStep(int rank, const Announcement& announcement);
  // Fails a late submission, if this is one.
  bool FailByTombstone(int rank, const Announcement& announcement, double now);
  void CheckBlocked(double now);
  // Asks `ranks` if that was not done lately, and after `since`; true when they have answered, or had the time to.
  bool Sought(const std::vector<int>& ranks, double since, double now);
  // Where each of `ranks` is, in one sentence per rank.
  std::string Sightings(const std::vector<int>& ranks) const;
  // Ranks that are waited for: they have neither come nor joined.
  std::vector<int> Missing(const Entry& entry) const;
  std::vector<int> Present(const Entry& entry) const;

  const Places& places_;
  const int size_;
  const double warn_after_s_;
  const double deadline_s_;
  Entries waiting_;
  std::vector<bool> left_;
  std::vector<bool> joined_;
  int last_joined_ = -1;
  std::map<std::string, std::vector<Tombstone>> tombstones_;
  std::vector<FailedStep> failing_;      // to be looked at by FailSteps
  std::deque<FailedStep> failed_steps_;  // the last few
  uint64_t num_failed_steps_ = 0;        // ever
  uint64_t num_failed_steps_seen_ = 0;   // by HasTombstones
  double failed_steps_until_ = 0;        // till when the last of them counts as a tombstone
  std::vector<Verdict> verdicts_;
  std::vector<std::string> warnings_;
  std::vector<Sighting> sightings_;  // by rank
  std::vector<int> questions_;
};

// "all_reduce 'loss' (float32[2])".
std::string Label(const Announcement& announcement);

// Compares the submissions of one collective, in the order of the ranks, at least one. Empty when they agree; else a
// message that names every field that differs, the ranks on each side and both values.
std::string DescribeMismatch(const std::vector<Submission>& submissions);

// splits.cc: of an all_to_all. Whether `splits` are 0 or more and add up to `rows`.
bool SplitsFit(const int64_t* splits, size_t num_splits, uint64_t rows);
// Of one that ranks agree on otherwise. Empty when every rank's splits fit; else a message that names the ranks where
// they do not, and the values.
std::string DescribeWrongSplits(const std::vector<Submission>& submissions);
// `decision` as each rank is to hear it, with the rows that it gets from each: P numbers for each of P ranks, where one
// message for all would carry P * P to each. Rank 0, which delivers them, comes last: it starts the collective at once.
// REQUIRES: submissions of all ranks, in their order, whose splits are right.
std::vector<Verdict> VerdictsOfAllToAll(const Decision& decision, const std::vector<Submission>& submissions);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_COORDINATOR_H_
