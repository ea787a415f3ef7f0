// All-reduce across groups: the group reduces a block, each of its ranks sends its shard around the rings, and the
// group gathers the shards.
#include <algorithm>

#include "hierarchy/hierarchical_collectives.h"

namespace ddl {

// One view per local rank, empty if the rank holds no shard.
std::vector<View> HierarchicalCollectives::Shards(const View& whole, uint64_t offset, uint64_t count) const {
  std::vector<View> shards;
  for (const Range& range : SplitEvenly(count, static_cast<int>(num_shards_))) {
    shards.push_back(whole.Slice(offset + range.begin, range.size()));
  }
  shards.resize(static_cast<size_t>(pipeline_.size()), View(whole.element_bytes()));
  return shards;
}

// The elements of a rank's shard of a block.
uint64_t HierarchicalCollectives::ShardLength(size_t element_bytes, size_t wire_bytes) const {
  return std::min(kWireMessageBytes * groups_.size() / wire_bytes, kLargestShardBytes / element_bytes);
}

Status HierarchicalCollectives::AllReduceAcross(const View& in, const View& out, const Stages& stages,
                                                const Compressed& compressed) {
  const size_t bytes = in.element_bytes();
  const size_t wire_bytes = compressed.to == DDL_COMPRESSION_NONE ? bytes : sizeof(uint16_t);
  const uint64_t shard = ShardLength(bytes, wire_bytes);
  const uint64_t length = shard * num_shards_;
  const uint64_t num_blocks = (in.count() + length - 1) / length;
  const auto elements = [&](uint64_t b) { return std::min(length, in.count() - b * length); };
  const auto local = static_cast<size_t>(pipeline_.rank());
  const bool has_errors = compressed.errors != nullptr && !blocks_.empty() && num_blocks > 0;
  if (has_errors) {
    const std::vector<Range> last = SplitEvenly(elements(num_blocks - 1), static_cast<int>(num_shards_));
    compressed.errors->resize((num_blocks - 1) * shard + last[local].size());
  }

  return RunBlocks(
      num_blocks,
      [&](uint64_t b, OuterAllReduce* outer) -> Status {
        const std::vector<View> parts = Shards(in, b * length, elements(b));
        const uint64_t count = parts[local].count();
        View sum(bytes);
        if (outer != nullptr) sum = View(bytes, outer->Block(EvenParts(count), bytes, compressed.to), count);
        DDL_RETURN_IF_ERROR(ShmReduceScatter(pipeline_, parts, sum, stages.inner));
        if (outer == nullptr) return {};
        return outer->Start(Halves::kBoth, stages.outer, stages.has_last ? &stages.last : nullptr,
                            has_errors ? compressed.errors->data() + b * shard : nullptr);
      },
      [&](uint64_t b, OuterAllReduce* outer) -> Status {
        const std::vector<View> results = Shards(out, b * length, elements(b));
        View sum(bytes);
        if (outer != nullptr) sum = View(bytes, outer->block(), results[local].count());
        return ShmAllGather(pipeline_, sum, results);
      });
}

Status HierarchicalCollectives::AllReduceBetween(const View& data, ddl_dtype dtype, ddl_op op) {
  const size_t bytes = data.element_bytes();
  const uint64_t length = ShardLength(bytes, bytes);
  const Stages stages = StagesOf(dtype, op, static_cast<int>(groups_.size()));
  const auto piece = [&](uint64_t b) { return data.Slice(b * length, std::min(length, data.count() - b * length)); };
  return RunBlocks((data.count() + length - 1) / length,
                   [&](uint64_t b, OuterAllReduce* outer) -> Status {
                     const View own = piece(b);
                     ReduceAlone(own, View(bytes, outer->Block(EvenParts(own.count()), bytes), own.count()),
                                 stages.inner);
                     return outer->Start(Halves::kBoth, stages.outer, stages.has_last ? &stages.last : nullptr);
                   },
                   [&](uint64_t b, OuterAllReduce* outer) -> Status {
                     const View own = piece(b);
                     CopyView(View(bytes, outer->block(), own.count()), own, Store::kCached);
                     return {};
                   });
}

std::vector<uint64_t> HierarchicalCollectives::EvenParts(uint64_t count) const {
  std::vector<uint64_t> parts;
  for (const Range& range : SplitEvenly(count, static_cast<int>(groups_.size()))) parts.push_back(range.size());
  return parts;
}

}  // namespace ddl
