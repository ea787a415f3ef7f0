// What `scale` runs; each prints members of a JSON object.
#ifndef KERAS_DDL_BENCH_SCALE_SIMULATIONS_H_
#define KERAS_DDL_BENCH_SCALE_SIMULATIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "scale/world.h"

namespace scale {

// coordinated.cc: collectives that rank 0 decides on, in full, by number, and the rows of a step by number.
void RunCoordinated(const World& world, uint32_t fan_in, int buckets, const std::string& label);
// planned.cc: the agreement of those that follow a plan.
void RunPlanned(World& world, int buckets, const char* label);
// rings.cc: one block around the rings of one place of the hosts, in a box of `outer`.
void RunRings(World& world, int per_host, const std::vector<int>& outer, const char* label);

}  // namespace scale
#endif  // KERAS_DDL_BENCH_SCALE_SIMULATIONS_H_
