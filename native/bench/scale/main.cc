// Runs the control plane of very many ranks in one process and one thread: the real code, with transports in memory.
// Called by benchmarks/scale.py.
//
//   scale RANKS RANKS_PER_HOST BUCKETS FAN_IN   prints one JSON object
#include <cstdio>
#include <cstdlib>

#include "scale/simulations.h"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: scale RANKS RANKS_PER_HOST BUCKETS FAN_IN\n");
    return 2;
  }
  const int size = std::atoi(argv[1]);
  const int per_host = std::atoi(argv[2]);
  const int buckets = std::atoi(argv[3]);
  const auto fan_in = static_cast<uint32_t>(std::atoi(argv[4]));
  const int hosts = size / per_host;
  scale::World world(size, per_host);
  std::printf("{\"ranks\": %d, \"hosts\": %d, \"buckets\": %d, ", size, hosts, buckets);
  scale::RunCoordinated(world, static_cast<uint32_t>(size), buckets, "");
  scale::RunCoordinated(world, fan_in, buckets, "tree_");
  scale::RunPlanned(world, buckets, "planned");
  scale::RunPlanned(world, 1, "planned_one");
  scale::RunRings(world, per_host, {hosts}, "ring");
  if (hosts % 16 == 0) {
    std::printf(", ");
    scale::RunRings(world, per_host, {16, hosts / 16}, "racks");
  }
  std::printf("}\n");
  return 0;
}
