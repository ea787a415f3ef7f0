#include "control/tree.h"

#include <algorithm>
#include <numeric>

#include "control/message.h"

namespace ddl {
namespace {

// How many leaders fit below one, in `levels` levels of `width` each; no more than `enough`.
uint64_t Capacity(uint64_t width, int levels, uint64_t enough) {
  uint64_t all = 0;
  uint64_t level = 1;
  for (int i = 0; i < levels && all < enough; ++i) {
    level = std::min(enough, level * width);
    all += level;
  }
  return all;
}

// Below how many others `count` leaders are best put, at most `fan_in` each: as few levels as that allows, then as few
// at each of them.
uint64_t Width(uint64_t count, uint64_t fan_in) {
  int levels = 1;
  while (Capacity(fan_in, levels, count) < count) ++levels;
  uint64_t width = 1;
  while (Capacity(width, levels, count) < count) ++width;
  return width;
}

// The places of leaders that are below one: itself first, up to `end`.
struct Span {
  size_t begin;
  size_t end;
};

std::vector<Span> Split(Span below, uint64_t fan_in) {
  const size_t count = below.end - below.begin;
  std::vector<Span> spans;
  if (count == 0) return spans;
  const uint64_t width = Width(count, fan_in);
  for (uint64_t i = 0; i < width; ++i) {
    spans.push_back({below.begin + count * i / width, below.begin + count * (i + 1) / width});
  }
  return spans;
}

}  // namespace

ControlTree::ControlTree(const std::vector<int>& group, int rank, uint32_t fan_in) : rank_(rank) {
  const uint64_t limit = fan_in == 0 ? kDefaultFanIn : fan_in;
  std::vector<std::vector<int>> members(group.size());
  std::vector<int> leaders;  // but rank 0
  for (size_t r = 0; r < group.size(); ++r) {
    if (group[r] == static_cast<int>(r) && r > 0) leaders.push_back(group[r]);
    members[static_cast<size_t>(group[r])].push_back(static_cast<int>(r));
  }
  const auto ranks_of = [&](Span span) {
    std::vector<int> ranks;
    for (size_t i = span.begin; i < span.end; ++i) {
      const auto& more = members[static_cast<size_t>(leaders[i])];
      ranks.insert(ranks.end(), more.begin(), more.end());
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  };
  const auto add = [&](const std::vector<Span>& spans) {
    for (const Span& span : spans) children_.push_back({leaders[span.begin], ranks_of(span)});
  };
  const auto add_members = [&] {
    for (const int member : members[static_cast<size_t>(rank)]) {
      if (member != rank) children_.push_back({member, {member}});
    }
  };
  ranks_ = {rank};
  if (rank != 0) parent_ = 0;
  const Span all{0, leaders.size()};
  const bool flat = group.size() - members[0].size() <= limit;
  if (rank == 0) {
    ranks_.resize(group.size());
    std::iota(ranks_.begin(), ranks_.end(), 0);
    add_members();
    if (!flat) add(Split(all, limit));
    for (size_t r = 1; flat && r < group.size(); ++r) {
      if (group[r] != 0) children_.push_back({static_cast<int>(r), {static_cast<int>(r)}});
    }
    return;
  }
  const int leader = group[static_cast<size_t>(rank)];
  if (flat || leader == 0) return;
  if (leader != rank) {
    parent_ = leader;
    return;
  }
  const auto place = static_cast<size_t>(std::lower_bound(leaders.begin(), leaders.end(), rank) - leaders.begin());
  Span below = all;
  for (;;) {
    const std::vector<Span> spans = Split(below, limit);
    const auto at = std::find_if(spans.begin(), spans.end(), [&](Span s) { return s.begin <= place && place < s.end; });
    below = {at->begin + 1, at->end};
    if (at->begin == place) {
      ranks_ = ranks_of(*at);
      break;
    }
    parent_ = leaders[at->begin];
  }
  add_members();
  add(Split(below, limit));
}

std::vector<Routed> Route(const ControlTree& tree, const std::vector<int>& ranks, const std::string& message) {
  std::vector<Routed> routed;
  std::string to_all;
  const bool everywhere = ranks.size() == tree.ranks().size();
  std::vector<int> sorted;
  if (!everywhere) {
    sorted = ranks;
    std::sort(sorted.begin(), sorted.end());
  }
  for (const ControlTree::Child& child : tree.children()) {
    std::vector<int> reached;
    if (!everywhere) {
      std::set_intersection(child.ranks.begin(), child.ranks.end(), sorted.begin(), sorted.end(),
                            std::back_inserter(reached));
      if (reached.empty()) continue;
    }
    if (child.ranks.size() == 1 || (reached.size() == 1 && reached[0] == child.rank)) {
      routed.push_back({child.rank, message});
    } else if (everywhere || reached.size() == child.ranks.size()) {
      if (to_all.empty()) to_all = EncodeForward({}, message);
      routed.push_back({child.rank, to_all});
    } else {
      routed.push_back({child.rank, EncodeForward(reached, message)});
    }
  }
  return routed;
}

}  // namespace ddl
