// Runs the control plane of very many ranks in one process and one thread: the real coordinator
// (control/coordinator.h) and the ranks between it and the others (control/relay.h), the agreement of planned
// collectives (engine/plan_lane.h) and the rings between hosts (net/outer_all_reduce.h), with transports in memory.
// Nothing waits and no time passes but that of the code itself; messages carry how many messages came before them one
// after the other. Called by benchmarks/scale.py.
//
//   scale RANKS RANKS_PER_HOST BUCKETS FAN_IN   prints one JSON object
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
#include "control/relay.h"
#include "control/tree.h"
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

// What ranks tell one another of how many rows they have, once a step.
ddl::Announcement RowsOf(uint64_t step) {
  ddl::Announcement a;
  a.kind = DDL_ALL_GATHER;
  a.dtype = DDL_INT64;
  a.row_count = 41;
  a.rows = 1;
  a.count = 41;
  a.step = step;
  a.name = "functional/train_step/rows";
  a.detail = "int64[1,41]";
  return a;
}

// The coordinator and those between it and the others: all messages of a collective, the work of rank 0, and that of
// the busiest of those between.
class Coordinated {
 public:
  Coordinated(const World& world, uint32_t fan_in) : size_(world.size), depth_(static_cast<size_t>(size_), 0) {
    ddl_transport nowhere = world.transports[0];
    Must(ddl::RankLocations::Exchange(nowhere, &locations_));
    coordinator_ = std::make_unique<ddl::Coordinator>(locations_, 30, 300);
    nodes_.resize(static_cast<size_t>(size_));
    for (int rank = 0; rank < size_; ++rank) {
      if (world.group[static_cast<size_t>(rank)] != rank) continue;  // its leader knows it
      Node& node = nodes_[static_cast<size_t>(rank)];
      node.tree = std::make_unique<ddl::ControlTree>(world.group, rank, fan_in);
      if (node.tree->relays()) node.relay = std::make_unique<ddl::Relay>(*node.tree);
      for (const auto& child : node.tree->children()) {
        nodes_[static_cast<size_t>(child.rank)].parent = rank;
        depth_[static_cast<size_t>(child.rank)] = depth_[static_cast<size_t>(rank)] + 1;
      }
    }
  }

  // All ranks announce these, and are told.
  void Run(const std::vector<ddl::Announcement>& all) {
    for (Node& node : nodes_) node.messages = node.bytes = 0, node.cpu = 0;
    for (const ddl::Announcement& mine : all) {
      const uint32_t id = ids_[mine.name];
      // Parents come before those behind them.
      for (int rank = size_ - 1; rank >= 0; --rank) Announce(rank, mine, id);
      Node& root = nodes_[0];
      const double began = CpuSeconds();
      std::vector<ddl::Routed> routed;
      for (const ddl::Verdict& verdict : coordinator_->TakeVerdicts()) {
        if (verdict.decision.gives_id) ids_[mine.name] = verdict.decision.id;
        Must({verdict.decision.code, verdict.decision.message});
        routed = ddl::Route(*root.tree, verdict.ranks, ddl::EncodeDecision(verdict.decision));
      }
      root.cpu += CpuSeconds() - began;
      told_ = 1;
      for (const ddl::Routed& each : routed) Down(0, each);
      if (told_ != size_) Must({DDL_INTERNAL, "a rank was not told"});
    }
  }

  void Print(const char* label) const {
    const Node& root = nodes_[0];
    Node busiest;
    for (const Node& node : nodes_) {
      if (node.relay == nullptr) continue;
      busiest.messages = std::max(busiest.messages, node.messages);
      busiest.cpu = std::max(busiest.cpu, node.cpu);
    }
    std::printf(
        "\"%s\": {\"messages\": %llu, \"bytes\": %llu, \"cpu_seconds\": %.9f, \"chain\": %d, \"relay_messages\": %llu, "
        "\"relay_cpu_seconds\": %.9f}, ",
        label, static_cast<unsigned long long>(root.messages), static_cast<unsigned long long>(root.bytes), root.cpu,
        2 * *std::max_element(depth_.begin(), depth_.end()), static_cast<unsigned long long>(busiest.messages),
        busiest.cpu);
  }

 private:
  struct Node {
    std::unique_ptr<ddl::ControlTree> tree;
    std::unique_ptr<ddl::Relay> relay;
    int parent = -1;
    std::vector<std::pair<int, std::string>> inbox;
    uint64_t messages = 0;
    uint64_t bytes = 0;
    double cpu = 0;
  };

  void Count(Node& node, const std::string& bytes) {
    ++node.messages;
    node.bytes += bytes.size();
  }

  // After those behind it have.
  void Announce(int rank, const ddl::Announcement& mine, uint32_t id) {
    Node& node = nodes_[static_cast<size_t>(rank)];
    std::string up;
    const double began = CpuSeconds();
    for (const auto& [from, bytes] : std::exchange(node.inbox, {})) Take(node, from, bytes);
    if (rank == 0) {
      coordinator_->Announce(0, mine, 0);
    } else if (node.relay != nullptr) {
      node.relay->Add({{rank}, {mine.step}, {mine.rows}, id, mine}, 0);
      const std::vector<std::string> messages = node.relay->TakeMessages();
      if (messages.size() != 1) Must({DDL_INTERNAL, "not one message for all"});
      up = messages[0];
    } else {
      up = id != 0 ? ddl::EncodeKnown(id, mine.step) : ddl::EncodeAnnouncement(mine);
    }
    node.cpu += CpuSeconds() - began;
    if (rank == 0) return;
    Count(node, up);
    Node& parent = nodes_[static_cast<size_t>(node.parent)];
    Count(parent, up);
    parent.inbox.emplace_back(rank, std::move(up));
  }

  // As Engine::HandleAnnouncement does.
  void Take(Node& node, int from, const std::string& bytes) {
    uint64_t step = 0;
    ddl::AlikeAnnouncements alike;
    switch (ddl::TypeOf(bytes)) {
      case ddl::MessageType::kAnnounce:
        alike.announcement = ddl::DecodeAnnouncement(bytes);
        if (node.relay == nullptr) return coordinator_->Announce(from, std::move(alike.announcement), 0);
        alike.ranks = {from};
        alike.steps = {alike.announcement.step};
        alike.rows = {alike.announcement.rows};
        break;
      case ddl::MessageType::kAnnounceKnown:
        alike.id = ddl::DecodeKnown(bytes, &step);
        if (node.relay == nullptr) return coordinator_->AnnounceKnown(from, alike.id, step, 0);
        alike.ranks = {from};
        alike.steps = {step};
        break;
      default:
        alike = ddl::DecodeAlike(bytes);
        if (node.relay == nullptr) return coordinator_->AnnounceAlike(std::move(alike), 0);
    }
    node.relay->Add(std::move(alike), 0);
  }

  void Down(int from, const ddl::Routed& routed) {
    Count(nodes_[static_cast<size_t>(from)], routed.bytes);
    Node& node = nodes_[static_cast<size_t>(routed.child)];
    ++told_;
    if (node.relay == nullptr) return;
    Count(node, routed.bytes);
    const double began = CpuSeconds();
    std::string message;
    (void)ddl::DecodeForward(routed.bytes, &message);
    node.relay->OnDecision(ddl::DecodeDecision(message));
    const std::vector<ddl::Routed> further = ddl::Route(*node.tree, node.tree->ranks(), message);
    node.cpu += CpuSeconds() - began;
    for (const ddl::Routed& each : further) Down(routed.child, each);
  }

  const int size_;
  ddl::RankLocations locations_;
  std::unique_ptr<ddl::Coordinator> coordinator_;
  std::vector<Node> nodes_;
  std::vector<int> depth_;
  std::map<std::string, uint32_t> ids_;
  int told_ = 0;
};

// Sums in full and by number, and the rows of a step by number.
void RunCoordinated(const World& world, uint32_t fan_in, int buckets, const std::string& label) {
  Coordinated all(world, fan_in);
  for (uint64_t step = 1; step <= 3; ++step) {
    std::vector<ddl::Announcement> sums;
    for (int bucket = 0; bucket < buckets; ++bucket) sums.push_back(AnnouncementOf(bucket, step));
    all.Run(sums);
    if (step == 1) all.Print((label + "first").c_str());
    if (step == 3) all.Print((label + "repeated").c_str());
  }
  for (uint64_t step = 1; step <= 3; ++step) all.Run({RowsOf(step)});
  all.Print((label + "rows").c_str());
}

void Planned(World& world, int buckets, const char* label) {
  struct Rank {
    std::unique_ptr<ddl::GroupMemory> memory;
    std::unique_ptr<ddl::PlanLane> lane;
    int ran = 0;
  };
  world.network.blocks.clear();  // of lanes that are no more
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
      "\"%s\": {\"messages\": %llu, \"bytes\": %llu, \"cpu_seconds\": %.9f, \"chain\": %llu, \"most_messages\": "
      "%llu, \"all_cpu_seconds\": %.9f, \"to_the_coordinator\": 0}, ",
      label, static_cast<unsigned long long>(net.at[0]), static_cast<unsigned long long>(net.bytes_at[0]),
      cpu_at_rank_0, static_cast<unsigned long long>(net.Longest()),
      static_cast<unsigned long long>(*std::max_element(net.at.begin(), net.at.end())), cpu);
  for (Rank& rank : ranks) rank.lane->Cancel();
}

// One block around the rings of one place of the hosts, in a box of `outer`.
void Rings(World& world, int per_host, const std::vector<int>& outer, const char* label) {
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

}  // namespace

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
  World world(size, per_host);
  std::printf("{\"ranks\": %d, \"hosts\": %d, \"buckets\": %d, ", size, hosts, buckets);
  RunCoordinated(world, static_cast<uint32_t>(size), buckets, "");
  RunCoordinated(world, fan_in, buckets, "tree_");
  Planned(world, buckets, "planned");
  Planned(world, 1, "planned_one");
  Rings(world, per_host, {hosts}, "ring");
  if (hosts % 16 == 0) {
    std::printf(", ");
    Rings(world, per_host, {16, hosts / 16}, "racks");
  }
  std::printf("}\n");
  return 0;
}
