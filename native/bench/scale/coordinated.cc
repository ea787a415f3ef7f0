// The real coordinator (control/coordinator.h) and the ranks between it and the others (control/relay.h).
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "control/coordinator.h"
#include "control/relay.h"
#include "control/tree.h"
#include "scale/simulations.h"

namespace scale {
namespace {

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

}  // namespace

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

}  // namespace scale
