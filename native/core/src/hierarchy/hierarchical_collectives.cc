#include "hierarchy/hierarchical_collectives.h"

#include <algorithm>
#include <numeric>

#include "base/tags.h"
#include "kernels/float16_mean.h"

namespace ddl {
namespace {

// Bytes that are broadcast at once; bounds the scratch memory.
constexpr uint64_t kBroadcastBytes = 8 * 1024 * 1024;

std::vector<std::vector<int>> GroupsOf(const std::vector<int>& group) {
  std::vector<std::vector<int>> groups;
  for (int leader = 0; leader < static_cast<int>(group.size()); ++leader) {
    std::vector<int> members;
    for (int rank = 0; rank < static_cast<int>(group.size()); ++rank) {
      if (group[static_cast<size_t>(rank)] == leader) members.push_back(rank);
    }
    if (!members.empty()) groups.push_back(members);
  }
  return groups;
}

bool EqualSizes(const std::vector<std::vector<int>>& groups) {
  return std::all_of(groups.begin(), groups.end(), [&](const auto& g) { return g.size() == groups[0].size(); });
}

size_t SmallestSize(const std::vector<std::vector<int>>& groups) {
  size_t smallest = groups[0].size();
  for (const auto& members : groups) smallest = std::min(smallest, members.size());
  return smallest;
}

int IndexOf(const std::vector<std::vector<int>>& groups, int rank) {
  for (size_t g = 0; g < groups.size(); ++g) {
    if (std::find(groups[g].begin(), groups[g].end(), rank) != groups[g].end()) return static_cast<int>(g);
  }
  return 0;
}

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

HierarchicalCollectives::HierarchicalCollectives(const ddl_transport& transport, GroupMemory& memory, Waiter& waiter,
                                                 const std::vector<int>& group, const std::vector<int>& outer)
    : transport_(transport),
      waiter_(waiter),
      pipeline_(memory, waiter),
      groups_(GroupsOf(group)),
      group_(IndexOf(groups_, transport.rank)),
      even_(EqualSizes(groups_)),
      outer_(outer.empty() ? std::vector<int>{static_cast<int>(groups_.size())} : outer),
      num_shards_(SmallestSize(groups_)),
      flat_(transport, waiter, AllRanks(transport.size), transport.rank) {
  group_of_part_.resize(groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    std::vector<int> positions;
    int rest = static_cast<int>(g);
    for (const int size : outer_) {
      positions.push_back(rest % size);
      rest /= size;
    }
    group_of_part_[OuterAllReduce::PartOf(positions, outer_)] = g;
  }
  const auto local = static_cast<size_t>(memory.local_rank());
  if (one_group() || local >= num_shards_) return;
  std::vector<RingPosition> rings;
  int stride = 1;
  for (const int size : outer_) {
    const int position = group_ / stride % size;
    const auto at = [&](int other) {
      return groups_[static_cast<size_t>(group_ + ((other + size) % size - position) * stride)][local];
    };
    rings.push_back({size, position, at(position + 1), at(position - 1)});
    stride *= size;
  }
  for (int i = 0; i < kBlocks; ++i) {
    blocks_.push_back(std::make_unique<OuterAllReduce>(transport, rings, kBlockTag + i));
  }
}

Status HierarchicalCollectives::AllReduce(const View& in, const View& out, ddl_dtype dtype, ddl_op op,
                                          const std::optional<Scheme>& agreed, const Compressed& compressed) {
  if (one_group()) return ShmAllReduce(pipeline_, in, out, {dtype, op, static_cast<double>(transport_.size)}, agreed);
  return AllReduceAcross(in, out, StagesOf(dtype, op, transport_.size), compressed);
}

HierarchicalCollectives::Stages HierarchicalCollectives::StagesOf(ddl_dtype dtype, ddl_op op, int ranks) {
  const Reduction across{dtype, op == DDL_MEAN ? DDL_SUM : op, 1.0};
  if (op != DDL_MEAN) return {across, across, across, false};
  // A mean divides last, which rounds once; but see kernels/float16_mean.h.
  if (dtype != DDL_FLOAT16) return {across, across, {dtype, DDL_MEAN, static_cast<double>(ranks)}, true};
  const double first = Float16Divisor(ranks);
  return {{dtype, DDL_MEAN, first}, across, {dtype, DDL_MEAN, ranks / first}, first != ranks};
}

Status HierarchicalCollectives::Broadcast(int root, const View& in, const View& out) {
  const int root_group = IndexOf(groups_, root);
  const auto& members = groups_[static_cast<size_t>(group_)];
  // The rank that represents a group: the root in its own, the leader elsewhere.
  std::vector<int> representatives;
  for (size_t g = 0; g < groups_.size(); ++g) {
    representatives.push_back(static_cast<int>(g) == root_group ? root : groups_[g][0]);
  }
  const int representative = representatives[static_cast<size_t>(group_)];
  const auto local_representative =
      static_cast<int>(std::find(members.begin(), members.end(), representative) - members.begin());
  if (one_group()) return ShmBroadcast(pipeline_, local_representative, in, out);

  const size_t bytes = out.element_bytes();
  const uint64_t block = kBroadcastBytes / bytes;
  Ring chain(transport_, waiter_, representatives, group_);
  for (uint64_t at = 0; at < out.count(); at += block) {
    const uint64_t n = std::min(block, out.count() - at);
    char* scratch = scratch_.Reserve(n * bytes);
    const View staged(bytes, scratch, n);
    if (transport_.rank == root) CopyView(in.Slice(at, n), staged, Store::kCached);
    if (transport_.rank == representative)
      DDL_RETURN_IF_ERROR(chain.Broadcast(root_group, scratch_, scratch, n * bytes));
    DDL_RETURN_IF_ERROR(ShmBroadcast(pipeline_, local_representative, staged, out.Slice(at, n)));
  }
  return {};
}

std::string HierarchicalCollectives::Describe() const {
  const size_t n = groups_.size();
  if (n == 1) return "1 group of " + std::to_string(groups_[0].size()) + " rank(s) in shared memory";
  std::string sizes;
  for (const auto& members : groups_) sizes += (sizes.empty() ? "" : " + ") + std::to_string(members.size());
  std::string dimensions;
  for (const int size : outer_) dimensions += (dimensions.empty() ? " as " : "x") + std::to_string(size);
  if (outer_.size() < 2) dimensions.clear();
  return std::to_string(n) + " groups (" + (even_ ? std::to_string(groups_[0].size()) + " each" : sizes) +
         " rank(s) in shared memory) joined by the transport" + dimensions;
}

}  // namespace ddl
