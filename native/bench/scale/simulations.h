// The simulations that `scale` runs. Each prints members of a JSON object.
#ifndef KERAS_DDL_BENCH_SCALE_SIMULATIONS_H_
#define KERAS_DDL_BENCH_SCALE_SIMULATIONS_H_

#include <functional>
#include <vector>

#include "scale/world.h"

namespace scale {

// coordinated.cc: collectives that rank 0 decides on, in full and by number, and the exchange of a step's rows.
void RunCoordinated(const World& world, int buckets);
// planned.cc: the agreement on a step's planned collectives.
using StepOf = std::function<std::vector<ddl::Announcement>(uint64_t step)>;
void RunPlanned(World& world, const StepOf& step_of, const char* label);
// rings.cc: one block around the rings between ranks at the same position of their hosts, in a box of `outer`.
void RunRings(World& world, int per_host, const std::vector<int>& outer, const char* label);

}  // namespace scale
#endif  // KERAS_DDL_BENCH_SCALE_SIMULATIONS_H_
