// Simulates the rings between hosts (net/outer_all_reduce.h).
#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "net/outer_all_reduce.h"
#include "scale/simulations.h"

namespace scale {

void RunRings(World& world, int per_host, const std::vector<int>& outer, const char* label) {
  const int hosts = world.size / per_host;
  std::vector<std::unique_ptr<ddl::OuterAllReduce>> blocks;
  const std::vector<uint64_t> parts(static_cast<size_t>(hosts), 4);
  const size_t count = parts.size() * 4;
  world.network.Clear();
  for (int host = 0; host < hosts; ++host) {
    std::vector<ddl::RingPosition> rings;
    int stride = 1;
    for (const int size : outer) {
      const int position = host / stride % size;
      const auto at = [&](int other) { return (host + ((other + size) % size - position) * stride) * per_host; };
      rings.push_back({size, position, at(position + 1), at(position - 1)});
      stride *= size;
    }
    blocks.push_back(
        std::make_unique<ddl::OuterAllReduce>(world.transports[static_cast<size_t>(host * per_host)], rings, 200));
    auto* const data = reinterpret_cast<float*>(blocks.back()->Block(parts, sizeof(float)));
    std::fill(data, data + count, 1.0f);
    Must(blocks.back()->Start(ddl::Halves::kBoth, {DDL_FLOAT32, DDL_SUM, 1.0}));
  }
  for (bool all = false; !all;) {
    all = true;
    ++world.network.round;
    for (auto& block : blocks) {
      bool moved = false;
      if (!block->done()) Must(block->Progress(&moved));
      all = all && block->done();
    }
  }
  for (auto& block : blocks) {
    const auto* const data = reinterpret_cast<const float*>(block->block());
    if (data[0] != static_cast<float>(hosts) || data[count - 1] != data[0]) Must({DDL_INTERNAL, "a sum is wrong"});
  }
  std::printf("\"%s\": {\"messages\": %llu, \"chain\": %llu}", label,
              static_cast<unsigned long long>(world.network.at[0]),
              static_cast<unsigned long long>(world.network.Longest()));
}

}  // namespace scale
