// Tuner: finds the fastest scheme for each size class by timing the all-reduces of the program itself, so that nothing
// is spent on probing. One rank of a group (local rank 0) tunes for all of them.
//
// Each class (sizes between two powers of two; beyond the caches there is one class) first tries every candidate a few
// times, in turns; then the one with the shortest median is used. A turn is several calls where buffers fit into the
// caches, and the first of them is not counted: what a scheme leaves in which cache helps the same scheme next time.
// The machine may change under the program (a neighbour on the host, cores moved by a hypervisor): when the scheme in
// use becomes clearly slower or faster than it was when chosen, and in any case once in a while, the candidates are
// tried again, by at most one call in fifty.
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
  struct Class {
    std::vector<Scheme> candidates;          // empty until the class is first met
    std::vector<std::vector<double>> times;  // of this exploration: seconds per byte, by candidate
    size_t turn = 1;                         // calls of a candidate in a row
    size_t trial = 0;                        // calls done of this exploration
    size_t rounds = 0;                       // turns of each candidate; 0 until the first round is over
    size_t chosen = 0;
    bool exploring = true;
    bool explored = false;      // once
    uint64_t trials_again = 0;  // calls of all explorations after the first
    uint64_t calls = 0;         // ever
    int uses = 0;               // of the chosen scheme, up to those that make the reference
    double reference = 0;       // seconds per byte of the chosen scheme after it was chosen
    double recent = 0;          // moving average of the chosen scheme
    double explored_at = 0;
  };

  Class& ClassOf(uint64_t bytes);
  void Explore(Class& c, double seconds, double seconds_per_byte, double now);

  const int ranks_;
  const size_t slot_bytes_;
  const bool reachable_;
  std::array<Class, 64> classes_;  // by floor(log2(bytes))
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_TUNER_H_
