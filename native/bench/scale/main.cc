// Runs the control plane of thousands of ranks in one process and one thread: the real code, with in-memory transports.
// Called by benchmarks/scale.py.
//
//   scale RANKS RANKS_PER_HOST BUCKETS   prints one JSON object
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "scale/simulations.h"

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: scale RANKS RANKS_PER_HOST BUCKETS\n");
    return 2;
  }
  const int size = std::atoi(argv[1]);
  const int per_host = std::atoi(argv[2]);
  const int buckets = std::atoi(argv[3]);
  const int hosts = size / per_host;
  scale::World world(size, per_host);
  std::printf("{\"ranks\": %d, \"hosts\": %d, \"buckets\": %d, ", size, hosts, buckets);
  scale::RunCoordinated(world, buckets);
  const auto sums = [&](uint64_t step) { return scale::SumsOf(buckets, step); };
  scale::RunPlanned(world, sums, "planned");
  scale::RunPlanned(world, [](uint64_t step) { return std::vector{scale::RowsOf(step)}; }, "planned_rows");
  scale::RunRings(world, per_host, {hosts}, "ring");
  if (hosts % 16 == 0) {
    std::printf(", ");
    scale::RunRings(world, per_host, {16, hosts / 16}, "racks");
  }
  std::printf("}\n");
  return 0;
}
