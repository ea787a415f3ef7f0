// Tuner: finds the fastest scheme for each size class by timing the program's own all-reduces, so that no time is spent
// on probing. One rank of a group (local rank 0) tunes for all of them.
//
// Each class (sizes between two powers of two; beyond the caches there is one class) first tries every candidate a
// few times, in turns; then it uses the one with the shortest median. Where buffers fit into the caches, a turn is
// several calls, and the first of them is not counted: the cache state that a scheme leaves behind favours the same
// scheme. Conditions may change while the program runs (another job on the host, cores moved by a hypervisor). When the
// scheme in use becomes clearly slower or faster than when it was chosen, and otherwise every now and then, the
// candidates are tried again, using at most one call in fifty.
#ifndef KERAS_DDL_CORE_SHM_TUNER_H_
#define KERAS_DDL_CORE_SHM_TUNER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/scheme.h"

namespace ddl {

class Tuner {
 public:
  Tuner(int ranks, size_t slot_bytes, bool reachable) : ranks_(ranks), slot_bytes_(slot_bytes), reachable_(reachable) {}

  // The scheme for the next all-reduce of `bytes`.
  Scheme Choose(uint64_t bytes);
  // How long the all-reduce of the last Choose took. `now`: seconds of a monotonic clock.
  void Report(uint64_t bytes, double seconds, double now);

 private:
  struct SizeClass {
    std::vector<Scheme> candidates;          // empty until the class is first used
    std::vector<std::vector<double>> times;  // of this exploration: seconds per byte, by candidate
    size_t turn = 1;                         // calls of a candidate in a row
    size_t trial = 0;                        // calls done of this exploration
    size_t rounds = 0;                       // turns of each candidate; 0 until the first round is over
    size_t chosen = 0;
    bool exploring = true;
    bool explored = false;      // at least once
    uint64_t trials_again = 0;  // calls of all explorations after the first
    uint64_t calls = 0;         // in total
    int uses = 0;               // of the chosen scheme, up to those that make the reference
    double reference = 0;       // seconds per byte of the chosen scheme after it was chosen
    double recent = 0;          // moving average of the chosen scheme
    double explored_at = 0;
  };

  SizeClass& SizeClassOf(uint64_t bytes);
  void Explore(SizeClass& c, double seconds, double seconds_per_byte, double now);

  const int ranks_;
  const size_t slot_bytes_;
  const bool reachable_;
  std::array<SizeClass, 64> classes_;  // by floor(log2(bytes))
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_TUNER_H_
