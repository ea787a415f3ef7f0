// The coordinator: rank 0's bookkeeping of which rank is ready for which collective. Pure logic: no threads, no I/O,
// no clock of its own (tests drive it directly).
#ifndef KERAS_DDL_CORE_COORDINATOR_H_
#define KERAS_DDL_CORE_COORDINATOR_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "message.h"

namespace ddl {

// One decision and the ranks it is for. A failed collective may be for some ranks only: those that submitted it.
struct Verdict {
  Decision decision;
  std::vector<int> ranks;
};

class Coordinator {
 public:
  // `warn_after_s`, `deadline_s`: 0 for never.
  Coordinator(int size, double warn_after_s, double deadline_s);

  // Rank `rank` is ready. `now`: seconds of a monotonic clock, never decreasing between calls.
  void Announce(int rank, Announcement announcement, double now);
  // Rank `rank` leaves: whatever waits for it, now or later, fails with DDL_ABORTED.
  void Leave(int rank);
  // Looks at what has waited too long. Call it some times a second while anything is pending.
  void Tick(double now);

  bool HasPending() const { return !waiting_.empty(); }
  bool HasLeft(int rank) const { return left_[static_cast<size_t>(rank)]; }

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
    double warned_at = 0;
  };
  // A rank owes an announcement of a collective that failed without it: it fails when it comes, until `until`. Of two
  // collectives that failed together it owes either, not both: `sibling` is the other's name, or empty.
  struct Debt {
    int rank;
    double until;
    Decision decision;
    std::string sibling;
  };
  using Entries = std::map<std::string, Entry>;

  void Match(Entries::iterator at);
  void Fail(Entries::iterator at, ddl_code code, const std::string& message);
  // Each of `debtors` gets `decision` when it comes.
  void Owe(const std::vector<int>& debtors, const Decision& decision, double now, const std::string& sibling);
  bool PayDebt(int rank, const std::string& name, double now);
  void CheckBlocked(double now);
  std::vector<int> Missing(const Entry& entry) const;
  std::vector<int> Present(const Entry& entry) const;

  const int size_;
  const double warn_after_s_;
  const double deadline_s_;
  Entries waiting_;
  std::vector<bool> left_;
  std::map<std::string, std::vector<Debt>> debts_;
  std::vector<Verdict> verdicts_;
  std::vector<std::string> warnings_;
};

// Compares the announcements of one collective (index: rank). Empty when they agree; else a message that names every
// field that differs, the ranks on each side and both values.
std::string DescribeMismatch(const std::vector<Announcement>& announcements);

// "0, 2, 5" or, for many, "0, 1, 2 and 61 more".
std::string JoinRanks(const std::vector<int>& ranks);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_COORDINATOR_H_
