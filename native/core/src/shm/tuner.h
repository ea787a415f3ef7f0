// Tuner: finds the fastest scheme for each kind of collective and size class by timing the program's own calls, so that
// no time is spent on probing. One rank of a group (local rank 0) tunes for all of them.
//
// Each class (sizes between two powers of two; beyond the caches there is one class) of a kind first tries every
// candidate a few times, in turns, and takes the one with the shortest median. A turn is several calls, and the first
// of them is not counted: the cache state that a scheme leaves behind favours the same scheme.
//
// Afterwards a candidate gets a turn now and then, between two turns of the scheme in use, whose mean it is compared
// with: the speed of a machine changes from second to second (another job on the host, cores moved by a hypervisor),
// the ratio of neighbours much less. What trials cost is bounded, by candidate: good ones are tried often,
// bad ones rarely. When the scheme in use becomes clearly slower or faster than it was, all are tried at once.
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
  // How long one with that scheme took.
  void Report(ddl_kind kind, const Scheme& scheme, uint64_t bytes, double seconds);

 private:
  struct Candidate {
    Scheme scheme;
    std::vector<double> times;  // of the first turns: seconds per byte
    double ratio = 1;           // its time over that of the scheme in use, a moving average
    uint64_t trials = 0;        // that the ratio comes from
    uint64_t last_trial = 0;    // turn
    double lost = 0;            // seconds per byte that its trials took longer than the scheme in use
  };
  struct SizeClass {
    std::vector<Candidate> candidates;  // empty until the class is first used
    size_t call = 0;                    // of this turn
    std::vector<double> times;          // of this turn, those that count: seconds per byte
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
