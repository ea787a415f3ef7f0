// Work across groups in blocks: while the messages of some blocks travel between groups, the ranks of a group prepare
// the next block in shared memory, and spread the result of a block that has come back. All ranks of a group process
// the blocks in the same order, and while a rank waits for a local rank it also progresses the blocks on the wire
// (Waiter::SetProgress), so no wait can be circular.
#include <algorithm>

#include "hierarchy/hierarchical_collectives.h"

namespace ddl {

Status HierarchicalCollectives::ProgressBlocks(bool* moved) {
  for (const auto& block : blocks_) {
    if (!block->done()) DDL_RETURN_IF_ERROR(block->Progress(moved));
  }
  return {};
}

Status HierarchicalCollectives::RunBlocks(uint64_t num_blocks, const BlockStep& leave, const BlockStep& come) {
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

  const uint64_t ahead = std::min<uint64_t>(kBlocks, num_blocks);
  // In turn: the oldest block comes back, the next one leaves.
  for (uint64_t b = 0; b < num_blocks + ahead; ++b) {
    OuterAllReduce* const outer = blocks_.empty() ? nullptr : blocks_[b % ahead].get();
    if (b >= ahead) {
      if (outer != nullptr) {
        DDL_RETURN_IF_ERROR(waiter_.Until([&] { return outer->done(); }, [&] { return outer->Describe(); }));
      }
      DDL_RETURN_IF_ERROR(come(b - ahead, outer));
    }
    if (b < num_blocks) DDL_RETURN_IF_ERROR(leave(b, outer));
  }
  progressing.finished = true;
  return {};
}

}  // namespace ddl
