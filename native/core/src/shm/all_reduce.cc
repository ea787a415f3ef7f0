// All-reduce inside a group through slots; see collectives.h for the schemes and their cost.
#include <algorithm>
#include <vector>

#include "shm/collectives.h"
#include "shm/tuned.h"

namespace ddl {
namespace {

constexpr uint64_t kTileBytes = 8 * 1024;

class AllReduce {
 public:
  AllReduce(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction, const Scheme& scheme)
      : pipeline_(pipeline),
        in_(in),
        out_(out),
        reduction_(reduction),
        bytes_(in.element_bytes()),
        chunk_(scheme.chunk_bytes / bytes_),
        steps_((in.count() + chunk_ - 1) / chunk_),
        first_(pipeline.Reserve(steps_)),
        slot_store_(scheme.slot_store),
        result_store_(scheme.result_store),
        sources_(static_cast<size_t>(pipeline.size())) {}

  // The copy into the slot of step k is issued before the reduction of step k - 1, so that a rank rarely waits.
  Status Direct() {
    for (uint64_t k = 0; k <= steps_; ++k) {
      if (k < steps_) DDL_RETURN_IF_ERROR(FillSlot(k, {0, 0}));
      if (k == 0) continue;
      const uint64_t step = first_ + k - 1;
      DDL_RETURN_IF_ERROR(pipeline_.WaitReady(step));
      ReduceAllOf(k - 1);
      pipeline_.MarkDone(step);
    }
    return {};
  }

  Status Split() {
    const int me = pipeline_.rank();
    for (uint64_t k = 0; k < steps_ + 2; ++k) {
      if (k < steps_) DDL_RETURN_IF_ERROR(FillSlot(k, ShardOf(me, pipeline_.size(), Elements(k), bytes_)));
      if (k >= 1 && k - 1 < steps_) {
        DDL_RETURN_IF_ERROR(pipeline_.WaitReady(first_ + k - 1));
        ReduceShard(k - 1, ShardOf(me, pipeline_.size(), Elements(k - 1), bytes_));
        pipeline_.MarkReduced(first_ + k - 1);
      }
      if (k >= 2) DDL_RETURN_IF_ERROR(CollectResults(k - 2));
    }
    return {};
  }

 private:
  uint64_t Elements(uint64_t k) const { return std::min(chunk_, in_.count() - k * chunk_); }

  // Publishes this rank's input of step k, except the elements of `kept`, which only this rank reads.
  Status FillSlot(uint64_t k, Range kept) {
    DDL_RETURN_IF_ERROR(pipeline_.WaitFree(first_ + k));
    char* slot = pipeline_.slot(pipeline_.rank(), first_ + k);
    CopyIn(k, slot, 0, kept.begin);
    CopyIn(k, slot, kept.end, Elements(k));
    pipeline_.MarkReady(first_ + k);
    return {};
  }

  void CopyIn(uint64_t k, char* slot, uint64_t begin, uint64_t end) {
    in_.ForEach(k * chunk_ + begin, end - begin, [&](const char* data, uint64_t from, uint64_t n) {
      Copy(slot + (begin + from) * bytes_, data, n * bytes_, slot_store_);
    });
  }

  // The address of each rank's data for element `at` of step k, where this rank's own is at `own`. Its own input is
  // read in place: it is warm in the cache, which its slot may have bypassed.
  const void* const* Sources(uint64_t k, uint64_t at, const char* own) {
    for (int j = 0; j < pipeline_.size(); ++j) {
      sources_[static_cast<size_t>(j)] = j == pipeline_.rank() ? own : pipeline_.slot(j, first_ + k) + at * bytes_;
    }
    return sources_.data();
  }

  // Reduces step k over all ranks into the output.
  void ReduceAllOf(uint64_t k) {
    View::ForEachPair(in_, out_, k * chunk_, Elements(k), [&](char* own, char* out, uint64_t from, uint64_t n) {
      const uint64_t tile = result_store_ == Store::kRepMovsb ? kTileBytes / bytes_ : n;
      for (uint64_t at = 0; at < n; at += tile) {
        const uint64_t m = std::min(tile, n - at);
        char* const first = result_store_ == Store::kRepMovsb ? tile_ : out + at * bytes_;
        Reduce(reduction_.dtype, reduction_.op, Sources(k, from + at, own + at * bytes_), pipeline_.size(), first, m,
               reduction_.divisor, result_store_);
        if (first == tile_) Copy(out + at * bytes_, first, m * bytes_, result_store_);
      }
    });
  }

  // Reduces this rank's shard of step k into the output and into the part of its slot that it left empty, which nobody
  // reads before MarkReduced. In tiles, so that the second copy is made from the first-level cache.
  void ReduceShard(uint64_t k, Range shard) {
    char* const results = pipeline_.slot(pipeline_.rank(), first_ + k) + shard.begin * bytes_;
    const uint64_t tile = kTileBytes / bytes_;
    View::ForEachPair(in_, out_, k * chunk_ + shard.begin, shard.end - shard.begin,
                      [&](char* own, char* out, uint64_t from, uint64_t n) {
                        for (uint64_t at = 0; at < n; at += tile) {
                          const uint64_t m = std::min(tile, n - at);
                          const void* const* sources = Sources(k, shard.begin + from + at, own + at * bytes_);
                          char* const direct = out + at * bytes_;
                          // Streamed data cannot be read back soon.
                          char* const first = result_store_ == Store::kCached ? direct : tile_;
                          Reduce(reduction_.dtype, reduction_.op, sources, pipeline_.size(), first, m,
                                 reduction_.divisor, Store::kCached);
                          if (first != direct) Copy(direct, first, m * bytes_, result_store_);
                          Copy(results + (from + at) * bytes_, first, m * bytes_, slot_store_);
                        }
                      });
  }

  Status CollectResults(uint64_t k) {
    for (int i = 1; i < pipeline_.size(); ++i) {
      // Each rank starts with its neighbour's shard, so that they do not all read one slot at once.
      const int j = (pipeline_.rank() + i) % pipeline_.size();
      DDL_RETURN_IF_ERROR(pipeline_.WaitReducedOf(j, first_ + k));
      const Range shard = ShardOf(j, pipeline_.size(), Elements(k), bytes_);
      const char* slot = pipeline_.slot(j, first_ + k) + shard.begin * bytes_;
      out_.ForEach(k * chunk_ + shard.begin, shard.end - shard.begin, [&](char* out, uint64_t from, uint64_t n) {
        Copy(out, slot + from * bytes_, n * bytes_, result_store_);
      });
    }
    pipeline_.MarkDone(first_ + k);
    return {};
  }

  ShmPipeline& pipeline_;
  const View& in_;
  const View& out_;
  const Reduction reduction_;
  const size_t bytes_;
  const uint64_t chunk_;
  const uint64_t steps_;
  const uint64_t first_;
  const Store slot_store_;
  const Store result_store_;
  std::vector<const void*> sources_;
  alignas(64) char tile_[kTileBytes];
};

}  // namespace

Range ShardOf(int j, int size, uint64_t n, size_t element_bytes) {
  const uint64_t line = 64 / element_bytes;
  const uint64_t each = ((n + static_cast<uint64_t>(size) - 1) / static_cast<uint64_t>(size) + line - 1) / line * line;
  return {std::min(n, static_cast<uint64_t>(j) * each), std::min(n, (static_cast<uint64_t>(j) + 1) * each)};
}

Status SlotAllReduce(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction,
                     const Scheme& scheme) {
  AllReduce all_reduce(pipeline, in, out, reduction, scheme);
  return scheme.algorithm == Algorithm::kSplit ? all_reduce.Split() : all_reduce.Direct();
}

Status ShmAllReduce(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction,
                    const std::optional<Scheme>& agreed) {
  if (pipeline.size() == 1) {
    ReduceAlone(in, out, reduction);
    return {};
  }
  return RunTuned(pipeline, DDL_ALL_REDUCE, in.bytes(), agreed, [&](const Scheme& scheme) {
    return scheme.algorithm == Algorithm::kCma ? CmaAllReduce(pipeline, in, out, reduction, scheme.chunk_bytes)
                                               : SlotAllReduce(pipeline, in, out, reduction, scheme);
  });
}

}  // namespace ddl
