// The tree of the control plane: its shape, and very many ranks announcing through it what the coordinator decides.
// Messages are encoded, passed on and decoded as in production, without threads and without time.
#include "control/tree.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "control/announced.h"
#include "control/coordinator.h"
#include "control/relay.h"

namespace ddl_test {
namespace {

using ddl::Announcement;
using ddl::ControlTree;

std::vector<int> Hosts(int hosts, int per_host, bool round_robin = false) {
  std::vector<int> group;
  for (int rank = 0; rank < hosts * per_host; ++rank)
    group.push_back(round_robin ? rank % hosts : rank / per_host * per_host);
  return group;
}

// Every rank is reached once, through the parent that it has, and no rank hears from too many.
int CheckShape(const std::vector<int>& group, uint32_t fan_in) {
  const int size = static_cast<int>(group.size());
  std::vector<ControlTree> trees;
  for (int rank = 0; rank < size; ++rank) trees.emplace_back(group, rank, fan_in);
  int deepest = 0;
  for (const ControlTree& tree : trees) {
    std::set<int> reached = {tree.rank()};
    uint32_t remote = 0;
    for (const ControlTree::Child& child : tree.children()) {
      const ControlTree& below = trees[static_cast<size_t>(child.rank)];
      EXPECT_EQ(below.parent(), tree.rank());
      EXPECT_EQ(below.ranks(), child.ranks);
      for (const int rank : child.ranks) EXPECT_TRUE(reached.insert(rank).second) << rank;
      remote += group[static_cast<size_t>(child.rank)] != group[static_cast<size_t>(tree.rank())] ? 1 : 0;
    }
    EXPECT_EQ(std::vector<int>(reached.begin(), reached.end()), tree.ranks());
    EXPECT_LE(remote, fan_in);
    int depth = 0;
    for (int at = tree.rank(); at != 0; at = trees[static_cast<size_t>(at)].parent()) ++depth;
    deepest = std::max(deepest, depth);
  }
  EXPECT_EQ(trees[0].ranks().size(), group.size());
  return deepest;
}

TEST(TreeTest, ReachesEveryRankOnce) {
  for (const bool round_robin : {false, true}) {
    for (const uint32_t fan_in : {1u, 2u, 3u, 64u}) {
      for (const int hosts : {1, 2, 3, 5, 16, 67}) {
        CheckShape(Hosts(hosts, 1), fan_in);
        CheckShape(Hosts(hosts, 4, round_robin), fan_in);
      }
    }
  }
  CheckShape({0, 0, 0, 3, 3, 5}, 1);
  CheckShape({0, 1, 0, 1, 4}, 1);
}

TEST(TreeTest, HasNoMoreLevelsThanItNeeds) {
  EXPECT_EQ(CheckShape(Hosts(16, 4), 64), 1);  // 60 others: they talk to rank 0 themselves
  EXPECT_EQ(CheckShape(Hosts(17, 4), 63), 2);  // through the first rank of their host
  EXPECT_EQ(CheckShape(Hosts(65, 4), 64), 2);
  EXPECT_EQ(CheckShape(Hosts(66, 4), 64), 3);
  const ControlTree root(Hosts(1024, 4), 0, 0);
  EXPECT_EQ(root.children().size(), 3u + 32);  // not 64 at rank 0 and 16 below: as few as two levels allow
}

// All ranks of a communicator that runs nowhere.
class World {
 public:
  World(std::vector<int> group, uint32_t fan_in)
      : group_(std::move(group)),
        locations_(Nowhere(static_cast<int>(group_.size()))),
        coordinator(locations_, 30, 300) {
    trees_.resize(group_.size());
    relays_.resize(group_.size());
    parents_.resize(group_.size(), -1);
    for (int rank = 0; rank < size(); ++rank) {
      const auto at = static_cast<size_t>(rank);
      if (group_[at] != rank) continue;  // behind it is nobody
      trees_[at] = std::make_unique<ControlTree>(group_, rank, fan_in);
      if (trees_[at]->relays()) relays_[at] = std::make_unique<ddl::Relay>(*trees_[at]);
      for (const auto& child : trees_[at]->children()) parents_[static_cast<size_t>(child.rank)] = rank;
    }
    decided.resize(group_.size());
  }
  int size() const { return static_cast<int>(group_.size()); }

  void Announce(int rank, const Announcement& a, uint32_t id = 0) {
    if (rank == 0) {
      coordinator.Announce(0, a, now);
    } else if (relays_[static_cast<size_t>(rank)] != nullptr) {
      relays_[static_cast<size_t>(rank)]->Add({{rank}, {a.step}, {a.rows}, id, a}, now);
      SendOn(rank);
    } else {
      Up(rank, parents_[static_cast<size_t>(rank)],
         id != 0 ? ddl::EncodeKnown(id, a.step) : ddl::EncodeAnnouncement(a));
    }
  }
  // Sends on what has waited, and hands out what is decided.
  void Settle() {
    for (int rank = size() - 1; rank > 0; --rank) {
      if (relays_[static_cast<size_t>(rank)] == nullptr) continue;
      relays_[static_cast<size_t>(rank)]->Tick(now);
      SendOn(rank);
    }
    for (const ddl::Verdict& verdict : coordinator.TakeVerdicts()) {
      for (const int rank : verdict.ranks) reached_.insert(rank);
      Down(0, verdict.ranks, ddl::EncodeDecision(verdict.decision));
      EXPECT_TRUE(reached_.empty()) << *reached_.begin() << " was not told";
    }
  }

 private:
  void SendOn(int relay) {
    for (const std::string& bytes : relays_[static_cast<size_t>(relay)]->TakeMessages()) {
      Up(relay, parents_[static_cast<size_t>(relay)], bytes);
    }
  }
  void Up(int from, int to, const std::string& bytes) {
    uint64_t step = 0;
    if (to == 0) {
      ++messages;
      this->bytes += bytes.size();
    }
    ddl::AlikeAnnouncements alike{{from}, {0}, {0}, 0, {}};
    switch (ddl::TypeOf(bytes)) {
      case ddl::MessageType::kAnnounce:
        alike.announcement = ddl::DecodeAnnouncement(bytes);
        alike.steps = {alike.announcement.step};
        alike.rows = {alike.announcement.rows};
        break;
      case ddl::MessageType::kAnnounceKnown:
        alike.id = ddl::DecodeKnown(bytes, &step);
        alike.steps = {step};
        break;
      default:
        alike = ddl::DecodeAlike(bytes);
    }
    if (to == 0) {
      coordinator.AnnounceAlike(alike, now);
    } else {
      relays_[static_cast<size_t>(to)]->Add(alike, now);
      SendOn(to);
    }
  }
  void Down(int at, const std::vector<int>& ranks, const std::string& bytes) {
    const ddl::Decision decision = ddl::DecodeDecision(bytes);
    if (relays_[static_cast<size_t>(at)] != nullptr) relays_[static_cast<size_t>(at)]->OnDecision(decision);
    for (const int rank : ranks) {
      if (rank != at) continue;
      decided[static_cast<size_t>(at)].push_back(decision);
      EXPECT_EQ(reached_.erase(at), 1u) << at << " was told twice, or another's";
    }
    if (trees_[static_cast<size_t>(at)] == nullptr) return;
    for (const ddl::Routed& routed : ddl::Route(*trees_[static_cast<size_t>(at)], ranks, bytes)) {
      if (at == 0) {
        ++messages;
        this->bytes += routed.bytes.size();
      }
      if (ddl::TypeOf(routed.bytes) != ddl::MessageType::kForward) {
        Down(routed.child, {routed.child}, routed.bytes);
        continue;
      }
      std::string message;
      std::vector<int> further = ddl::DecodeForward(routed.bytes, &message);
      if (further.empty()) further = trees_[static_cast<size_t>(routed.child)]->ranks();
      Down(routed.child, further, message);
    }
  }

  const std::vector<int> group_;
  const ddl::RankLocations locations_;
  std::vector<std::unique_ptr<ControlTree>> trees_;  // of the leaders of groups
  std::vector<int> parents_;
  std::vector<std::unique_ptr<ddl::Relay>> relays_;
  std::set<int> reached_;

 public:
  ddl::Coordinator coordinator;
  double now = 0;
  uint64_t messages = 0;  // at rank 0
  uint64_t bytes = 0;
  std::vector<std::vector<ddl::Decision>> decided;  // by rank
};

TEST(TreeTest, VeryManyRanksSendRankZeroFewMessages) {
  const std::map<int, uint64_t> most = {{256, 2 * (3 + 63)}, {1024, 2 * (3 + 16)}, {4096, 2 * (3 + 32)}};
  for (const auto& [size, messages] : most) {
    World world(Hosts(size / 4, 4), 0);
    Announcement gathered = Bucket("rows", 0);
    gathered.kind = DDL_ALL_GATHER;
    gathered.rows = 1;
    for (uint64_t step = 1; step <= 4; ++step) {
      world.messages = world.bytes = 0;
      for (int rank = size - 1; rank >= 0; --rank) {
        gathered.step = 1000 * step + static_cast<uint64_t>(rank % 7);
        world.Announce(rank, gathered, step > 2 ? 1 : 0);
      }
      world.Settle();
      EXPECT_EQ(world.messages, messages) << size;
      for (const auto& each : world.decided) {
        ASSERT_EQ(each.size(), step);
        EXPECT_EQ(each.back().code, DDL_OK);
        EXPECT_EQ(each.back().rows, std::vector<uint64_t>(static_cast<size_t>(size), 1));
        EXPECT_EQ(each.back().id, step >= 2 ? 1u : 0u);
      }
    }
    EXPECT_LT(world.bytes, static_cast<uint64_t>(size) * 24);
  }
}

TEST(TreeTest, MessagesAreThoseWithoutATree) {
  for (const int size : {256, 1024, 4096}) {
    World through(Hosts(size / 4, 4), 2);
    World direct(Hosts(size / 4, 4), static_cast<uint32_t>(size));
    for (World* const world : {&through, &direct}) {
      for (int rank = 0; rank < size; ++rank) {
        Announcement a = Bucket("sum", static_cast<uint64_t>(rank) + 1);
        if (rank == 7) a.count = 5;
        if (rank == 41) a.dtype = DDL_INT32;
        if (rank > size - 3) a.detail = "float32[10,100]";
        world->Announce(rank, a);
      }
      // Of the same steps; cancelled with the first on two ranks.
      for (const int rank : {6, size - 1}) world->Announce(rank, Bucket("later", static_cast<uint64_t>(rank) + 1));
      for (int i = 0; i < 12; ++i) {
        world->now += 1;
        world->Settle();
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      const auto& one = through.decided[static_cast<size_t>(rank)];
      const auto& other = direct.decided[static_cast<size_t>(rank)];
      ASSERT_EQ(one.size(), rank == 6 || rank == size - 1 ? 2u : 1u) << rank;
      ASSERT_EQ(one.size(), other.size());
      for (size_t i = 0; i < one.size(); ++i) {
        EXPECT_EQ(one[i].code, DDL_FAILED_PRECONDITION);
        EXPECT_EQ(one[i].message, other[i].message);
      }
    }
    const std::string& message = through.decided[0][0].message;
    EXPECT_NE(message.find("5 on rank(s) 7"), std::string::npos) << message;
    EXPECT_NE(message.find("int32 on rank(s) 41"), std::string::npos) << message;
  }
}

TEST(TreeTest, RowsAndSplitsOfEachRankArrive) {
  World world(Hosts(8, 3, true), 2);
  for (int rank = 0; rank < world.size(); ++rank) {
    Announcement gathered = Bucket("gathered", 1);
    gathered.kind = DDL_ALL_GATHER;
    gathered.rows = static_cast<uint64_t>(rank * rank);
    world.Announce(rank, gathered);
    Announcement exchanged = Bucket("exchanged", 1);
    exchanged.kind = DDL_ALL_TO_ALL;
    for (int to = 0; to < world.size(); ++to) exchanged.splits.push_back(100 * rank + to);
    exchanged.rows =
        static_cast<uint64_t>(std::accumulate(exchanged.splits.begin(), exchanged.splits.end(), int64_t{0}));
    world.Announce(rank, exchanged);
  }
  world.Settle();
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto& decided = world.decided[static_cast<size_t>(rank)];
    ASSERT_EQ(decided.size(), 2u);
    const auto& gathered = decided[decided[0].name == "gathered" ? 0 : 1];
    const auto& exchanged = decided[decided[0].name == "gathered" ? 1 : 0];
    for (int other = 0; other < world.size(); ++other) {
      EXPECT_EQ(gathered.rows.at(static_cast<size_t>(other)), static_cast<uint64_t>(other * other));
      EXPECT_EQ(exchanged.rows.at(static_cast<size_t>(other)), static_cast<uint64_t>(100 * other + rank));
    }
  }
}

TEST(TreeTest, MissingRanksAreKnownAndJoinedOnesNotWaitedFor) {
  World world(Hosts(64, 4), 8);
  const std::set<int> late = {5, 130, 255};
  for (int rank = 0; rank < world.size(); ++rank) {
    if (late.count(rank) == 0) world.Announce(rank, Bucket("sum", 0));
  }
  for (int i = 0; i < 4; ++i) {
    world.now += 1;
    world.Settle();
  }
  world.now = 40;
  world.coordinator.Tick(world.now);
  EXPECT_EQ(world.coordinator.TakePositionQueries(), std::vector<int>(late.begin(), late.end()));
  for (const int rank : late) {
    Announcement join;
    join.kind = DDL_JOIN;
    world.Announce(rank, join);
  }
  world.Settle();  // no time has passed: those who join go on at once
  for (int rank = 0; rank < world.size(); ++rank) {
    ASSERT_EQ(world.decided[static_cast<size_t>(rank)].size(), 1u) << rank;
    EXPECT_EQ(world.decided[static_cast<size_t>(rank)][0].joined, std::vector<int32_t>(late.begin(), late.end()));
  }
  for (int rank = 0; rank < world.size(); ++rank) {
    Announcement join;
    join.kind = DDL_JOIN;
    if (late.count(rank) == 0) world.Announce(rank, join);
  }
  world.Settle();
  world.messages = 0;
  for (int rank = 0; rank < world.size(); ++rank) {
    ASSERT_EQ(world.decided[static_cast<size_t>(rank)].size(), 2u) << rank;
    world.Announce(rank, Bucket("sum", 0));
  }
  world.Settle();
  EXPECT_LE(world.messages, 2u * (3 + 8));  // all are waited for again
  for (const auto& decided : world.decided) EXPECT_EQ(decided.size(), 3u);
}

}  // namespace
}  // namespace ddl_test
