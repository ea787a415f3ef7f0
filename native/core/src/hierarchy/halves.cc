// Reduce-scatter and all-gather, the two halves of an all-reduce, with ranges that the caller gives. Groups of equal
// size work in blocks, which contain a piece of every rank's range.
#include <algorithm>

#include "hierarchy/hierarchical_collectives.h"
#include "kernels/float16_mean.h"

namespace ddl {
namespace {

// The piece of `range` that belongs to block b, in blocks of `length` elements of each range.
Range PieceOf(const Range& range, uint64_t b, uint64_t length) {
  return {std::min(range.begin + b * length, range.end), std::min(range.begin + (b + 1) * length, range.end)};
}

uint64_t Longest(const std::vector<Range>& ranges) {
  uint64_t longest = 0;
  for (const Range& range : ranges) longest = std::max(longest, range.size());
  return longest;
}

}  // namespace

uint64_t HierarchicalCollectives::PieceLength(size_t element_bytes) const {
  return std::min(kWireMessageBytes, kLargestShardBytes / groups_.size()) / element_bytes;
}

// Returns for each local rank the pieces of the ranks with this local rank in all groups, in the order of a block's
// parts.
std::vector<View> HierarchicalCollectives::PiecesByLocalRank(const View& whole, const std::vector<Range>& ranges,
                                                             uint64_t b, uint64_t length) const {
  std::vector<View> views;
  for (size_t j = 0; j < groups_[0].size(); ++j) {
    View view(whole.element_bytes());
    for (const size_t g : group_of_part_) {
      const Range piece = PieceOf(ranges[static_cast<size_t>(groups_[g][j])], b, length);
      view.Add(whole, piece.begin, piece.size());
    }
    views.push_back(view);
  }
  return views;
}

// Returns the number of elements in each part of this rank's block.
std::vector<uint64_t> HierarchicalCollectives::PartsOf(const std::vector<Range>& ranges, uint64_t b,
                                                       uint64_t length) const {
  std::vector<uint64_t> parts;
  for (const size_t g : group_of_part_) {
    const auto rank = static_cast<size_t>(groups_[g][static_cast<size_t>(pipeline_.rank())]);
    parts.push_back(PieceOf(ranges[rank], b, length).size());
  }
  return parts;
}

Status HierarchicalCollectives::ReduceScatter(const View& in, char* out, const std::vector<Range>& ranges,
                                              ddl_dtype dtype, ddl_op op) {
  const size_t bytes = in.element_bytes();
  const Range own = ranges[static_cast<size_t>(transport_.rank)];
  if (!even_) {
    // Groups of unequal size: the whole sum passes through scratch memory of N bytes.
    std::vector<char> whole(in.bytes());
    DDL_RETURN_IF_ERROR(AllReduce(in, View(bytes, whole.data(), in.count()), dtype, op));
    Copy(out, whole.data() + own.begin * bytes, own.size() * bytes, Store::kCached);
    return {};
  }
  const uint64_t longest = Longest(ranges);
  if (one_group()) {
    const Reduction reduction{dtype, op, static_cast<double>(transport_.size)};
    return ShmReduceScatter(pipeline_, PiecesByLocalRank(in, ranges, 0, longest), View(bytes, out, own.size()),
                            reduction);
  }
  const Stages stages = StagesOf(dtype, op, transport_.size);
  const uint64_t length = PieceLength(bytes);
  return RunBlocks((longest + length - 1) / length,
                   [&](uint64_t b, OuterAllReduce* outer) -> Status {
                     const std::vector<View> pieces = PiecesByLocalRank(in, ranges, b, length);
                     const uint64_t count = pieces[static_cast<size_t>(pipeline_.rank())].count();
                     const View sum(bytes, outer->Block(PartsOf(ranges, b, length), bytes), count);
                     DDL_RETURN_IF_ERROR(ShmReduceScatter(pipeline_, pieces, sum, stages.inner));
                     return outer->Start(Halves::kReduceScatter, stages.outer);
                   },
                   [&](uint64_t b, OuterAllReduce* outer) -> Status {
                     const Range piece = PieceOf(own, b, length);
                     const View sum(bytes, outer->part(outer->own_part()), piece.size());
                     const View result(bytes, out + (piece.begin - own.begin) * bytes, piece.size());
                     if (stages.has_last) {
                       DivideLast(sum, result, stages.last);
                     } else {
                       CopyView(sum, result, Store::kCached);
                     }
                     return {};
                   });
}

Status HierarchicalCollectives::AllGather(const View& in, char* out, const std::vector<Range>& ranges,
                                          size_t element_bytes) {
  const Range own = ranges[static_cast<size_t>(transport_.rank)];
  if (!even_) {
    CopyView(in, View(element_bytes, out + own.begin * element_bytes, own.size()), Store::kCached);
    return flat_.AllGather(out, ranges, element_bytes);
  }
  const View whole(element_bytes, out, ranges.back().end);
  const uint64_t longest = Longest(ranges);
  if (one_group()) return ShmAllGather(pipeline_, in, PiecesByLocalRank(whole, ranges, 0, longest));
  // First the ranks with equal local ranks gather along their rings, then the ranks of each group share the results.
  const uint64_t length = PieceLength(element_bytes);
  return RunBlocks((longest + length - 1) / length,
                   [&](uint64_t b, OuterAllReduce* outer) -> Status {
                     outer->Block(PartsOf(ranges, b, length), element_bytes);
                     const Range piece = PieceOf({0, own.size()}, b, length);
                     const View place(element_bytes, outer->part(outer->own_part()), piece.size());
                     CopyView(in.Slice(piece.begin, piece.size()), place, Store::kCached);
                     return outer->Start(Halves::kAllGather, {});
                   },
                   [&](uint64_t b, OuterAllReduce* outer) -> Status {
                     const std::vector<View> results = PiecesByLocalRank(whole, ranges, b, length);
                     const View gathered(element_bytes, outer->block(),
                                         results[static_cast<size_t>(pipeline_.rank())].count());
                     return ShmAllGather(pipeline_, gathered, results);
                   });
}

}  // namespace ddl
