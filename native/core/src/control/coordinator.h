// The coordinator: rank 0's record of which rank is ready for which collective, and of which ranks have joined. A rank
// that has joined submits nothing more and counts as ready for every collective. Pure logic: no threads, no I/O and no
// clock, so that tests can drive it directly.
#ifndef KERAS_DDL_CORE_CONTROL_COORDINATOR_H_
#define KERAS_DDL_CORE_CONTROL_COORDINATOR_H_

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "control/known_collectives.h"
#include "control/message.h"
#include "liveness/rank_locations.h"

namespace ddl {

// An announcement of a rank. Ranks that announce the same collective by its id share one object.
struct Submission {
  int rank;
  std::shared_ptr<const Announcement> announcement;
  uint64_t step;
};

// One decision and the ranks that it is sent to. The decision on a failed collective may only go to the ranks that
// submitted it.
struct Verdict {
  Decision decision;
  std::vector<int> ranks;
};

// The collectives with which ranks recover after one of them has failed.
constexpr uint32_t kOfFailure = DDL_FLAG_CANCELS | DDL_FLAG_RESUMES;

class Coordinator {
 public:
  // `warn_after_s`, `deadline_s`: 0 for never. `locations` must outlive this.
  Coordinator(const RankLocations& locations, double warn_after_s, double deadline_s);

  // Rank `rank` is ready, or joins. REQUIRES: it has not joined. `now`: seconds of a monotonic clock, never decreasing
  // between calls.
  // Cost: constant; deciding on a collective costs a look at every rank.
  void Announce(int rank, Announcement announcement, double now);
  // The same for a collective to which a decision has assigned this id (Decision::id).
  void AnnounceKnown(int rank, uint32_t id, uint64_t step, double now);

  // Rank `rank` leaves: every collective that waits for it, now or later, fails with DDL_UNAVAILABLE.
  void Leave(int rank);
  // Warns about collectives that have waited too long, and fails those past the deadline. Call it several times a
  // second while anything is pending. Before it warns or fails, it asks the missing ranks where they are and waits a
  // moment for their reports.
  void Tick(double now);
  // Returns the ranks to ask for their position since the last call. Pass each reply to OnPositionReport.
  std::vector<int> TakePositionQueries();
  // Rank `rank` is alive. `last`: no further report follows. `text`: that of a Position (message.h).
  void OnPositionReport(int rank, const std::string& text, bool last);

  // True while some rank may still submit a collective that failed without it, or more of a failed step.
  bool HasTombstones(double now);
  // While this is true, every request must go through the coordinator, because some rank takes part without submitting
  // anything itself.
  bool AnyJoined() const { return num_joined_ > 0; }

  // The decisions since the last call, in order.
  std::vector<Verdict> TakeVerdicts();
  // Warnings for the user since the last call.
  std::vector<std::string> TakeWarnings();
  // The number of ranks that matching has looked at so far, which is proportional to its cost.
  uint64_t ranks_looked_at() const { return ranks_looked_at_; }

 private:
  struct Waiting {
    std::shared_ptr<const Announcement> announcement;
    uint64_t step;
    double since;
  };
  struct Entry {
    std::vector<std::list<Waiting>> by_rank;  // FIFO per rank; a list, because an empty one takes no memory
    int present = 0;                          // ranks that have submitted it
    int missing = 0;                          // ranks that it waits for
    double since = 0;                         // when the oldest waiting request came
    double warn_age = 0;                      // age at which to warn next; 0: not warned yet
  };
  // What a rank has replied since it was asked for its position.
  struct PositionReport {
    double asked = -1e9;
    bool lives = false;
    bool last = false;
    Position position;
  };
  // Marks a collective that failed without this rank: until `until`, a late submission of it fails with the original
  // error. If several collectives failed together, the rank can submit only one of them, which removes its other
  // tombstones of the same `failure`.
  struct Tombstone {
    int rank;
    double until;
    Decision decision;
    uint64_t failure;
  };
  // A run of a graph on one rank in which a collective has failed: the graph is cancelled there, and whether it still
  // submits its other collectives depends on timing. None of them can complete.
  struct FailedStep {
    int rank;
    uint64_t step;
    Decision cause;
  };
  using Entries = std::map<std::string, Entry>;

  void Wait(int rank, Waiting waiting);
  // coordinator_steps.cc. The first announcement with DDL_FLAG_CANCELS fails whatever waits. True: this one fails, too.
  bool FailIfCancelled(int rank, const Announcement& announcement);
  void Match(Entries::iterator at);
  // Takes the oldest request of `rank`, which has one.
  Waiting Take(Entry& entry, int rank);
  // Assigns an id (known_collectives.h) to a collective that all ranks have announced identically for the second time.
  void AssignId(const std::vector<Submission>& all, Decision* decision);
  // Decides every collective that has become complete or impossible. Entries may be erased.
  void MatchAll();
  // coordinator_join.cc.
  void Join(int rank);
  // When all ranks have joined, or one has left without joining: completes or fails the joins.
  void EndJoins();
  std::vector<int> Joined() const;
  // Why a collective that ranks agree on cannot run without the data of `joined`; OK when it can.
  static Status MissingData(const std::vector<int>& joined, const std::vector<Submission>& submissions);
  void Fail(Entries::iterator at, const Status& status);
  // Each of `late` gets `decision` if it still submits the collective.
  void AddTombstones(const std::vector<int>& late, const Decision& decision, double now, uint64_t failure);
  // coordinator_steps.cc. Fails the waiting requests of the steps in failing_, and remembers these steps as failed.
  // Entries may be erased.
  void FailSteps();
  // Fails an announcement of a failed step; false: its step has not failed.
  bool FailIfStepFailed(int rank, const std::string& name, uint64_t step);
  // Fails a late submission of a collective that has failed; false: it is not one.
  bool FailByTombstone(int rank, const std::string& name, uint64_t step, double now);
  // coordinator_deadlock.cc. Ranks that wait for the same collectives and can submit nothing else before one of these
  // ends.
  struct WaitSet {
    std::vector<std::string> waits_in;  // names
    std::vector<int> ranks;             // the first stands for all
    bool blocked = false;               // the main thread waits in it; else the rank must show that it is idle
    double since = 0;                   // when the last of these was submitted
  };
  // Fails the collectives of ranks that wait for one another in different ones.
  void FailDeadlocked(double now);
  std::vector<WaitSet> WaitSets(double now) const;
  // Removes the wait sets in which a collective may still complete.
  void KeepDeadlocked(std::vector<WaitSet>* sets) const;
  // Whether the rank is known to do nothing but wait. Asks the rank if necessary.
  bool IsIdle(int rank, double now);
  size_t NumWaiting(int rank) const;
  // Asks `ranks` for their positions unless that was done recently and after `since`; true when they have answered, or
  // have had time to.
  bool PositionsKnown(const std::vector<int>& ranks, double since, double now);
  // Where each of `ranks` is, in one sentence per rank.
  std::string DescribePositions(const std::vector<int>& ranks) const;
  // Ranks that are waited for: they have neither submitted it nor joined.
  std::vector<int> Missing(const Entry& entry) const;
  std::vector<int> Present(const Entry& entry) const;
  const Announcement& Any(const Entry& entry) const;

  const RankLocations& locations_;
  const int size_;
  const double warn_after_s_;
  const double deadline_s_;
  Entries waiting_;
  KnownCollectives known_;
  std::unordered_set<uint64_t> seen_;  // hashes of collectives that came once
  mutable uint64_t ranks_looked_at_ = 0;
  std::vector<bool> left_;
  std::set<int> ranks_left_;
  std::vector<bool> joined_;
  int num_joined_ = 0;
  int last_joined_ = -1;
  std::map<std::string, std::vector<Tombstone>> tombstones_;
  std::vector<FailedStep> failing_;                            // to be looked at by FailSteps
  std::map<std::pair<int, uint64_t>, Decision> failed_steps_;  // the last few: why, by rank and step
  std::deque<std::pair<int, uint64_t>> failed_order_;          // the oldest first
  uint64_t num_failed_steps_ = 0;                              // in total
  uint64_t num_failed_steps_seen_ = 0;                         // by HasTombstones
  double failed_steps_until_ = 0;                              // until when the last of them counts as a tombstone
  bool cancelling_ = false;                                    // from DDL_FLAG_CANCELS to DDL_FLAG_RESUMES
  std::vector<Verdict> verdicts_;
  std::vector<std::string> warnings_;
  double deadlock_looked_at_ = -1e9;
  uint64_t num_failures_ = 0;                     // see Tombstone
  std::vector<PositionReport> position_reports_;  // by rank
  std::vector<int> position_queries_;
};

// "all_reduce 'loss' (float32[2])".
std::string Label(const Announcement& announcement);
// Why it fails when rank `rank` has left.
Status HasLeft(const Announcement& announcement, int rank, const RankLocations& locations);

// Compares the submissions of one collective, in the order of the ranks; there is at least one. Returns OK if they
// agree, else a message that names every field that differs, the ranks on each side and both values.
Status Mismatch(const std::vector<Submission>& submissions);

// splits.cc, for an all_to_all. Whether all `splits` are 0 or more and add up to `rows`.
bool SplitsAreValid(const int64_t* splits, size_t num_splits, uint64_t rows);
// For an all_to_all on which ranks otherwise agree. Returns OK if every rank's splits are valid, else a message that
// names the ranks with invalid splits, and their values.
Status WrongSplits(const std::vector<Submission>& submissions);
// Returns one verdict per rank: `decision` with the rows that the rank receives from each rank. So each of P ranks gets
// P numbers, while one message for all ranks would have P * P. Rank 0, which delivers the verdicts, comes last, because
// it starts the collective at once. REQUIRES: submissions of all ranks, in rank order, whose splits are valid.
std::vector<Verdict> AllToAllVerdicts(const Decision& decision, const std::vector<Submission>& submissions);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_COORDINATOR_H_
