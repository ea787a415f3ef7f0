// Simulates the agreement on planned collectives (engine/plan_lane.h).
#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "engine/plan_lane.h"
#include "scale/simulations.h"
#include "shm/group_memory.h"

namespace scale {

void RunPlanned(World& world, const StepOf& step_of, const char* label) {
  struct Rank {
    std::unique_ptr<ddl::GroupMemory> memory;
    std::unique_ptr<ddl::PlanLane> lane;
    size_t ran = 0;
  };
  world.network.blocks.clear();  // left by earlier lanes
  std::vector<Rank> ranks(static_cast<size_t>(world.size));
  uint64_t fallbacks = 0;
  for (size_t r = 0; r < ranks.size(); ++r) {
    Must(ddl::GroupMemory::Create(world.transports[r], world.group, 4096, &ranks[r].memory));
    ranks[r].lane = std::make_unique<ddl::PlanLane>(world.transports[r], *ranks[r].memory, world.group, 1.0,
                                                    [&](std::unique_ptr<ddl::Request>) { ++fallbacks; });
  }
  double cpu = 0;
  double cpu_at_rank_0 = 0;
  for (uint64_t step = 1; step <= 3; ++step) {
    world.network.Clear();
    cpu = cpu_at_rank_0 = 0;
    const std::vector<ddl::Announcement> all_of_step = step_of(step);
    for (size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].ran = 0;
      for (size_t index = 0; index < all_of_step.size(); ++index) {
        auto request = std::make_unique<ddl::Request>();
        request->announcement = all_of_step[index];
        request->place = {77, step, static_cast<uint32_t>(index), static_cast<uint32_t>(all_of_step.size())};
        ranks[r].lane->runs().Add(std::move(request), 0);
      }
    }
    for (bool all = false; !all;) {
      all = true;
      ++world.network.round;
      for (size_t r = 0; r < ranks.size(); ++r) {
        const double began = CpuSeconds();
        std::unique_ptr<ddl::Request> run;
        bool worked = false;
        Must(ranks[r].lane->Progress(0.1, &run, &worked));
        const double took = CpuSeconds() - began;
        cpu += took;
        if (r == 0) cpu_at_rank_0 += took;
        if (run != nullptr) ++ranks[r].ran;
        all = all && ranks[r].ran == all_of_step.size();
      }
    }
  }
  if (fallbacks != 0) Must({DDL_INTERNAL, "a planned collective fell back"});
  const Network& net = world.network;
  std::printf(
      "\"%s\": {\"messages\": %llu, \"bytes\": %llu, \"cpu_seconds\": %.9f, \"chain\": %llu, \"most_messages\": "
      "%llu, \"all_cpu_seconds\": %.9f, \"to_the_coordinator\": 0}, ",
      label, static_cast<unsigned long long>(net.at[0]), static_cast<unsigned long long>(net.bytes_at[0]),
      cpu_at_rank_0, static_cast<unsigned long long>(net.Longest()),
      static_cast<unsigned long long>(*std::max_element(net.at.begin(), net.at.end())), cpu);
  for (Rank& rank : ranks) rank.lane->Cancel();
}

}  // namespace scale
