// Tuner: finds the fastest scheme for each kind of collective and size class by timing the program's own calls, so that
// no time is spent on probing. One rank of a group (local rank 0) tunes for all of them.
//
// Each size class of a kind (sizes between two powers of two; beyond the caches there is one class) first tries every
// candidate a few times, in turns, and takes the one with the shortest median. A turn is several calls. The first call
// does not count, because the cache state that a scheme leaves behind favours the same scheme.
//
// Afterwards a candidate sometimes gets a turn between two turns of the scheme in use, and is compared with their mean.
// The speed of a machine changes from second to second (another job on the host, cores moved by a hypervisor), but the
// ratio of neighbouring turns changes much less. The cost of trials is bounded for each candidate, so good candidates
// are tried often and bad ones rarely. When the scheme in use becomes clearly slower or faster, all candidates are
// tried at once.
#ifndef KERAS_DDL_CORE_SHM_TUNER_H_
#define KERAS_DDL_CORE_SHM_TUNER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "shm/scheme.h"

namespace ddl {

class Tuner {
 public:
  Tuner(int ranks, size_t slot_bytes, bool reachable) : ranks_(ranks), slot_bytes_(slot_bytes), reachable_(reachable) {}

  // The scheme for the next collective of that kind and size; see CandidateSchemes.
  Scheme Choose(ddl_kind kind, uint64_t bytes);
  // Records how long a collective with that scheme took.
  void Report(ddl_kind kind, const Scheme& scheme, uint64_t bytes, double seconds);

 private:
  struct Candidate {
    Scheme scheme;
    std::vector<double> times;  // of the first turns: seconds per byte
    double ratio = 1;           // its time over the time of the scheme in use, a moving average
    uint64_t trials = 0;        // trials in the ratio
    uint64_t last_trial = 0;    // turn
    double lost = 0;            // seconds per byte that its trials took longer than the scheme in use
  };
  struct SizeClass {
    std::vector<Candidate> candidates;  // empty until the class is first used
    size_t call = 0;                    // calls in this turn
    std::vector<double> times;          // of the calls in this turn that count: seconds per byte
    uint64_t turn = 0;
    size_t current = 0;  // candidate whose turn it is
    size_t chosen = 0;
    size_t rounds = 0;  // of first turns; 0 until the first round is over
    bool settled = false;
    double before = 0;         // the turn of the chosen one before this one
    double trial = 0;          // the turn of `tried` that is not yet compared; 0: none
    size_t tried = 0;          // candidate
    uint64_t last_trial = 0;   // turn
    bool urgent = false;       // the last trial was: see IsUrgent
    double total = 0;          // seconds per byte of all calls
    double lost_urgently = 0;  // see Candidate::lost
    double usual = 0;          // moving averages of the chosen one's turns, slow and fast
    double recent = 0;
  };

  SizeClass& SizeClassOf(ddl_kind kind, uint64_t bytes);
  static void EndTurn(SizeClass& c, double time);
  static void EndFirstTurn(SizeClass& c, double time, double seconds);
  static void Learn(SizeClass& c, double ratio, double lost);
  static void LookForChange(SizeClass& c, double time);
  static bool IsUrgent(const Candidate& candidate);
  static size_t NextTrial(const SizeClass& c);

  const int ranks_;
  const size_t slot_bytes_;
  const bool reachable_;
  std::map<std::pair<ddl_kind, size_t>, SizeClass> classes_;  // by kind and floor(log2(bytes))
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_TUNER_H_
