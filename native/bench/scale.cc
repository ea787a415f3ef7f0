// Runs the control plane of very many ranks in one process and one thread: the real coordinator
// (control/coordinator.h), the agreement of planned collectives (engine/plan_lane.h) and the rings between hosts
// (net/outer_all_reduce.h), with transports in memory. Nothing waits and no time passes but that of the code itself;
// messages carry how many messages came before them one after the other. Called by benchmarks/scale.py.
//
//   scale RANKS RANKS_PER_HOST BUCKETS   prints one JSON object
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/waiter.h"
#include "control/coordinator.h"
#include "engine/plan_lane.h"
#include "net/outer_all_reduce.h"
#include "shm/group_memory.h"

namespace {

double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void Must(const ddl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "scale: %s\n", status.message().c_str());
  std::exit(1);
}

// A receive that is under way; a send is done at once, and its operation is null.
struct Operation {
  int peer;
  int tag;
  void* buffer;
  bool arrived;
  uint64_t depth;
};

// What ranks have sent. `depth`: of a rank, the longest chain of messages that it has seen the end of.
struct Network {
  struct Sent {
    int source;
    std::string bytes;
    uint64_t depth;
    uint64_t round;
  };
  struct Channel {
    std::deque<Sent> sent;
    std::deque<Operation*> receives;
  };
  explicit Network(int size)
      : channels(static_cast<size_t>(size)), depth(static_cast<size_t>(size)), at(depth), bytes_at(depth) {}

  std::vector<std::map<int, Channel>> channels;  // by destination and tag
  uint64_t round = 0;
  std::vector<uint64_t> depth;
  std::vector<uint64_t> at;  // messages from and to each rank
  std::vector<uint64_t> bytes_at;
  std::map<int, void*> blocks;

  void Clear() {
    std::fill(depth.begin(), depth.end(), 0);
    std::fill(at.begin(), at.end(), 0);
    std::fill(bytes_at.begin(), bytes_at.end(), 0);
  }
  uint64_t Longest() const { return *std::max_element(depth.begin(), depth.end()); }
};

struct End {
  Network* network;
  int rank;
};

// Gives receives, in the order in which they were posted, the oldest messages of their senders. What was sent in this
// round is on its way.
void Match(const End& me, int tag) {
  Network::Channel& channel = me.network->channels[static_cast<size_t>(me.rank)][tag];
  auto& receives = channel.receives;
  for (auto at = receives.begin(); at != receives.end();) {
    Operation& receive = **at;
    const auto from_peer = [&](const auto& sent) { return sent.source == receive.peer; };
    const auto found = std::find_if(channel.sent.begin(), channel.sent.end(), from_peer);
    if (found == channel.sent.end() || found->round == me.network->round) {
      ++at;
      continue;
    }
    std::memcpy(receive.buffer, found->bytes.data(), found->bytes.size());
    receive.depth = found->depth;
    receive.arrived = true;
    channel.sent.erase(found);
    at = receives.erase(at);
  }
}

ddl_transport TransportOf(End* end, int size) {
  ddl_transport transport{};
  transport.abi_version = DDL_ABI_VERSION;
  transport.rank = end->rank;
  transport.size = size;
  transport.self = end;
  transport.isend = [](void* self, int peer, int tag, const void* buffer, size_t bytes, void** operation) {
    const End& me = *static_cast<End*>(self);
    Network& net = *me.network;
    const auto from = static_cast<size_t>(me.rank);
    const auto to = static_cast<size_t>(peer);
    net.channels[to][tag].sent.push_back(
        {me.rank, {static_cast<const char*>(buffer), bytes}, net.depth[from] + 1, net.round});
    for (const size_t rank : {from, to}) {
      ++net.at[rank];
      net.bytes_at[rank] += bytes;
    }
    *operation = nullptr;
    return static_cast<int>(DDL_OK);
  };
  transport.irecv = [](void* self, int peer, int tag, void* buffer, size_t, void** operation) {
    auto* const receive = new Operation{peer, tag, buffer, false, 0};
    const End& me = *static_cast<End*>(self);
    me.network->channels[static_cast<size_t>(me.rank)][tag].receives.push_back(receive);
    Match(me, tag);
    *operation = receive;
    return static_cast<int>(DDL_OK);
  };
  transport.test = [](void* self, void** operation, int* finished) {
    const End& me = *static_cast<End*>(self);
    auto* const receive = static_cast<Operation*>(*operation);
    *finished = 1;
    if (receive == nullptr) return static_cast<int>(DDL_OK);
    if (!receive->arrived) Match(me, receive->tag);
    *finished = receive->arrived ? 1 : 0;
    if (!receive->arrived) return static_cast<int>(DDL_OK);
    uint64_t& depth = me.network->depth[static_cast<size_t>(me.rank)];
    depth = std::max(depth, receive->depth);
    delete receive;
    *operation = nullptr;
    return static_cast<int>(DDL_OK);
  };
  transport.cancel = [](void*, void**) { return static_cast<int>(DDL_OK); };
  transport.probe = [](void* self, int tag, int* peer, size_t* bytes) {
    const End& me = *static_cast<End*>(self);
    const auto& queue = me.network->channels[static_cast<size_t>(me.rank)][tag].sent;
    const bool any = !queue.empty() && queue.front().round != me.network->round;
    *peer = any ? queue.front().source : -1;
    *bytes = any ? queue.front().bytes.size() : 0;
    return static_cast<int>(DDL_OK);
  };
  transport.last_error = [](void*) { return "no error"; };
  // Pages that are not used take no memory, as in production.
  transport.share = [](void* self, int leader, size_t bytes) -> void* {
    void*& block = static_cast<End*>(self)->network->blocks[leader];
    if (block == nullptr) {
      block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (block == MAP_FAILED) return nullptr;
    }
    return block;
  };
  transport.all_gather = [](void*, const void* in, void* out, size_t bytes) {
    std::memcpy(out, in, bytes);
    return static_cast<int>(DDL_OK);
  };
  transport.destroy = [](void*) {};
  return transport;
}

struct World {
  World(int size_in, int per_host) : size(size_in), network(size_in) {
    for (int rank = 0; rank < size; ++rank) {
      group.push_back(rank - rank % per_host);
      ends.push_back({&network, rank});
    }
    for (int rank = 0; rank < size; ++rank) transports.push_back(TransportOf(&ends[static_cast<size_t>(rank)], size));
  }
  const int size;
  Network network;
  std::vector<int> group;
  std::deque<End> ends;
  std::vector<ddl_transport> transports;
};

std::string NameOf(int bucket) { return "functional/train_step/3f9a0c21/sum_" + std::to_string(bucket); }

ddl::Announcement AnnouncementOf(int bucket, uint64_t step) {
  ddl::Announcement a;
  a.kind = DDL_ALL_REDUCE;
  a.count = 6'250'000;
  a.fingerprint = 12345;
  a.step = step;
  a.name = NameOf(bucket);
  a.detail = "float32[1024,4096], float32[4096], float32[1024,1953]";
  return a;
}

// One step through the coordinator: what the other ranks send, rank 0's work on it, and what it answers.
void Coordinated(World& world, ddl::Coordinator& coordinator, std::vector<uint32_t>& ids, int buckets, uint64_t step,
                 const char* label) {
  uint64_t bytes = 0;
  uint64_t messages = 0;
  double cpu = 0;
  for (int bucket = 0; bucket < buckets; ++bucket) {
    const auto at = static_cast<size_t>(bucket);
    const ddl::Announcement mine = AnnouncementOf(bucket, step);
    const std::string sent = ids[at] != 0 ? ddl::EncodeKnown(ids[at], step) : ddl::EncodeAnnouncement(mine);
    const double began = CpuSeconds();
    for (int rank = 0; rank < world.size; ++rank) {
      uint64_t its_step = step;
      if (rank == 0) {
        coordinator.Announce(0, mine, 0);
      } else if (ids[at] != 0) {
        const uint32_t id = ddl::DecodeKnown(sent, &its_step);
        coordinator.AnnounceKnown(rank, id, its_step, 0);
      } else {
        coordinator.Announce(rank, ddl::DecodeAnnouncement(sent), 0);
      }
    }
    std::string answer;
    for (const ddl::Verdict& verdict : coordinator.TakeVerdicts()) {
      answer = ddl::EncodeDecision(verdict.decision);
      if (verdict.decision.gives_id) ids[at] = verdict.decision.id;
    }
    cpu += CpuSeconds() - began;
    messages += 2 * static_cast<uint64_t>(world.size - 1);
    bytes += static_cast<uint64_t>(world.size - 1) * (sent.size() + answer.size());
  }
  std::printf("\"%s\": {\"messages\": %llu, \"bytes\": %llu, \"cpu_seconds\": %.9f, \"chain\": 2}, ", label,
              static_cast<unsigned long long>(messages), static_cast<unsigned long long>(bytes), cpu);
}

void Planned(World& world, int buckets) {
  struct Rank {
    std::unique_ptr<ddl::GroupMemory> memory;
    std::unique_ptr<ddl::PlanLane> lane;
    int ran = 0;
  };
  std::vector<Rank> ranks(static_cast<size_t>(world.size));
  uint64_t demoted = 0;
  for (size_t r = 0; r < ranks.size(); ++r) {
    Must(ddl::GroupMemory::Create(world.transports[r], world.group, 4096, &ranks[r].memory));
    ranks[r].lane = std::make_unique<ddl::PlanLane>(world.transports[r], *ranks[r].memory, world.group, 1.0,
                                                    [&](std::unique_ptr<ddl::Request>) { ++demoted; });
  }
  double cpu = 0;
  double cpu_at_rank_0 = 0;
  for (uint64_t step = 1; step <= 3; ++step) {
    world.network.Clear();
    cpu = cpu_at_rank_0 = 0;
    for (size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].ran = 0;
      for (int bucket = 0; bucket < buckets; ++bucket) {
        auto request = std::make_unique<ddl::Request>();
        request->announcement = AnnouncementOf(bucket, step);
        request->place = {77, step, static_cast<uint32_t>(bucket), static_cast<uint32_t>(buckets)};
        ranks[r].lane->runs().Add(std::move(request), 0);
      }
    }
    for (bool all = false; !all;) {
      all = true;
      ++world.network.round;
      for (size_t r = 0; r < ranks.size(); ++r) {
        const double began = CpuSeconds();
        std::unique_ptr<ddl::Request> run;
        bool moved = false;
        Must(ranks[r].lane->Progress(0.1, &run, &moved));
        const double took = CpuSeconds() - began;
        cpu += took;
        if (r == 0) cpu_at_rank_0 += took;
        if (run != nullptr) ++ranks[r].ran;
        all = all && ranks[r].ran == buckets;
      }
    }
  }
  if (demoted != 0) Must({DDL_INTERNAL, "a planned collective was demoted"});
  const Network& net = world.network;
  std::printf(
      "\"planned\": {\"messages\": %llu, \"bytes\": %llu, \"cpu_seconds\": %.9f, \"chain\": %llu, \"most_messages\": "
      "%llu, \"all_cpu_seconds\": %.9f, \"to_the_coordinator\": 0}, ",
      static_cast<unsigned long long>(net.at[0]), static_cast<unsigned long long>(net.bytes_at[0]), cpu_at_rank_0,
      static_cast<unsigned long long>(net.Longest()),
      static_cast<unsigned long long>(*std::max_element(net.at.begin(), net.at.end())), cpu);
  for (Rank& rank : ranks) rank.lane->Cancel();
}

// One block around the rings of one place of the hosts, in a box of `outer`.
void Rings(World& world, int per_host, const std::vector<int>& outer, const char* label) {
  const int hosts = world.size / per_host;
  std::vector<std::unique_ptr<ddl::OuterAllReduce>> blocks;
  const uint64_t count = static_cast<uint64_t>(hosts) * 4;
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
    auto* const data = reinterpret_cast<float*>(blocks.back()->Block(count, DDL_FLOAT32));
    std::fill(data, data + count, 1.0f);
    Must(blocks.back()->Start({DDL_FLOAT32, DDL_SUM, 1.0}, nullptr));
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

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: scale RANKS RANKS_PER_HOST BUCKETS\n");
    return 2;
  }
  const int size = std::atoi(argv[1]);
  const int per_host = std::atoi(argv[2]);
  const int buckets = std::atoi(argv[3]);
  const int hosts = size / per_host;
  World world(size, per_host);
  ddl::RankLocations locations;
  std::printf("{\"ranks\": %d, \"hosts\": %d, \"buckets\": %d, ", size, hosts, buckets);
  {
    ddl_transport nowhere = world.transports[0];
    Must(ddl::RankLocations::Exchange(nowhere, &locations));
    ddl::Coordinator coordinator(locations, 30, 300);
    std::vector<uint32_t> ids(static_cast<size_t>(buckets));
    Coordinated(world, coordinator, ids, buckets, 1, "first");
    Coordinated(world, coordinator, ids, buckets, 2, "second");
    Coordinated(world, coordinator, ids, buckets, 3, "repeated");
  }
  Planned(world, buckets);
  Rings(world, per_host, {hosts}, "ring");
  if (hosts % 16 == 0) {
    std::printf(", ");
    Rings(world, per_host, {16, hosts / 16}, "racks");
  }
  std::printf("}\n");
  return 0;
}
