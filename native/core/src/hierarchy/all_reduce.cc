// All-reduce across groups, in blocks: while the messages of some blocks travel between groups, shared memory reduces
// the next block and spreads the one that has come back. All ranks of a group take the blocks in the same order, and
// every wait for a local rank moves the blocks on the wire too (Waiter::SetProgress), so no wait can be circular.
#include <algorithm>

#include "hierarchy/hierarchical_collectives.h"

namespace ddl {
namespace {

// One rank's shard of a block; bounds its memory: kBlocks blocks, each with room for two messages beside.
constexpr uint64_t kLargestShardBytes = 8 * 1024 * 1024;

}  // namespace

// One view per local rank; empty for those that hold no shard.
std::vector<View> HierarchicalCollectives::Shards(const View& whole, uint64_t offset, uint64_t count) const {
  std::vector<View> shards;
  for (const Range& range : SplitEvenly(count, static_cast<int>(num_shards_))) {
    shards.push_back(whole.Slice(offset + range.begin, range.size()));
  }
  shards.resize(static_cast<size_t>(pipeline_.size()), View(whole.element_bytes()));
  return shards;
}

Status HierarchicalCollectives::ProgressBlocks(bool* moved) {
  for (const auto& block : blocks_) {
    if (!block->done()) DDL_RETURN_IF_ERROR(block->Progress(moved));
  }
  return {};
}

Status HierarchicalCollectives::AllReduceAcross(const View& in, const View& out, const Stages& stages,
                                                ddl_dtype dtype) {
  struct Progressing {
    HierarchicalCollectives& all;
    bool finished = false;
    explicit Progressing(HierarchicalCollectives& owner) : all(owner) {
      all.waiter_.SetProgress([this](bool* moved) { return all.ProgressBlocks(moved); });
    }
    ~Progressing() {
      all.waiter_.SetProgress(nullptr);
      if (finished) return;
      for (const auto& block : all.blocks_) block->Cancel();
    }
  } progressing(*this);

  const size_t bytes = in.element_bytes();
  const uint64_t shard = std::min(kWireMessageBytes * groups_.size(), kLargestShardBytes) / bytes;
  const uint64_t length = shard * num_shards_;
  const uint64_t num_blocks = (in.count() + length - 1) / length;
  const uint64_t ahead = std::min<uint64_t>(kBlocks, num_blocks);
  const auto elements = [&](uint64_t b) { return std::min(length, in.count() - b * length); };
  const auto local = static_cast<size_t>(pipeline_.rank());

  // In turn: the oldest block comes back, the next one leaves.
  for (uint64_t b = 0; b < num_blocks + ahead; ++b) {
    OuterAllReduce* const outer = blocks_.empty() ? nullptr : blocks_[b % ahead].get();
    if (b >= ahead) {
      const std::vector<View> results = Shards(out, (b - ahead) * length, elements(b - ahead));
      View sum(bytes);
      if (outer != nullptr) {
        DDL_RETURN_IF_ERROR(waiter_.Until([&] { return outer->done(); }, [&] { return outer->Describe(); }));
        sum = View(bytes, outer->block(), results[local].count());
      }
      DDL_RETURN_IF_ERROR(ShmAllGather(pipeline_, sum, results));
    }
    if (b < num_blocks) {
      const std::vector<View> parts = Shards(in, b * length, elements(b));
      View sum(bytes);
      if (outer != nullptr) sum = View(bytes, outer->Block(parts[local].count(), dtype), parts[local].count());
      DDL_RETURN_IF_ERROR(ShmReduceScatter(pipeline_, parts, sum, stages.inner));
      if (outer != nullptr) {
        DDL_RETURN_IF_ERROR(outer->Start(stages.outer, stages.has_last ? &stages.last : nullptr));
      }
    }
  }
  progressing.finished = true;
  return {};
}

}  // namespace ddl
