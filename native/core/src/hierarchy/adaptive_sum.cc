// Adaptive sums. Each rank receives one piece of several ranks' vectors, combines these pieces up the tree
// (adaptive_tree.h), and then all ranks gather the results. For any number of ranks P, a rank sends 2 (P-1)/P N bytes,
// as in vector halving with distance doubling (Maleki et al., arXiv 2006.02924, 2020). This needs N bytes of extra
// memory, or 3 N for 16-bit floats, which are sent as they are and combined in float32.
//
// If no pair of the tree straddles two dimensions of the box, each dimension is a separate step: first inside the
// group, then between the groups with 1/L of the vector per rank. Otherwise all ranks exchange pieces directly, which
// sends L times as many bytes between groups of L.
#include "kernels/adaptive_sum.h"

#include <memory>

#include "common/dtypes.h"
#include "hierarchy/adaptive_tree.h"
#include "hierarchy/hierarchical_collectives.h"
#include "kernels/kernels.h"

namespace ddl {
namespace {

// Memory kept for the next call: getting new memory from the system costs more than combining the vectors in it.
constexpr uint64_t kKeptBytes = uint64_t{64} * 1024 * 1024;

// Not initialised, unlike a std::vector.
using Memory = std::unique_ptr<char[]>;
Memory Allocate(uint64_t bytes) { return Memory(new char[bytes + 1]); }

bool IsPowerOfTwo(int n) { return (n & (n - 1)) == 0; }

Range Bytes(const Range& range, size_t element_bytes) {
  return {range.begin * element_bytes, range.end * element_bytes};
}

View BytesOf(const View& view, const Range& range) {
  View bytes(1);
  view.ForEach(range.begin, range.size(),
               [&](char* data, uint64_t, uint64_t n) { bytes.Add(data, n * view.element_bytes()); });
  return bytes;
}

// The memory of a view if it is contiguous, else nullptr.
char* ContiguousMemory(const View& view) {
  char* first = nullptr;
  view.ForEach(0, view.count(), [&](char* data, uint64_t offset, uint64_t n) {
    if (offset == 0 && n == view.count()) first = data;
  });
  return first;
}

// Returns the `count` consecutive vectors of `length` elements in `raw`, in the dtype in which they are combined. If
// that dtype is wider, the vectors are converted into `wide`.
std::vector<char*> Widened(ddl_dtype dtype, char* raw, char* wide, size_t count, uint64_t length) {
  const bool same = WideDtype(dtype) == dtype;
  if (!same) Widen(dtype, raw, 1, reinterpret_cast<float*>(wide), count * length, false);
  std::vector<char*> vectors;
  for (size_t v = 0; v < count; ++v) {
    vectors.push_back((same ? raw : wide) + v * length * DtypeSize(WideDtype(dtype)));
  }
  return vectors;
}

void StoreResult(ddl_dtype dtype, const char* wide, char* out, uint64_t count) {
  if (WideDtype(dtype) == dtype) {
    Copy(out, wide, count * DtypeSize(dtype), Store::kCached);
  } else {
    Narrow(dtype, reinterpret_cast<const float*>(wide), 1, out, 1, nullptr, count);
  }
}

}  // namespace

Status HierarchicalCollectives::AdaptiveSum(const View& in, const View& out, const std::vector<uint64_t>& tensors,
                                            ddl_dtype dtype) {
  if (transport_.size == 1 || in.count() == 0) {
    CopyView(in, out, Store::kCached);
    return {};
  }
  if (!TreeFollowsBox()) return AdaptiveSumOfAll(in, out, tensors, dtype);
  const Status status = AdaptiveSumOfBox(in, out, tensors, dtype);
  adaptive_memory_.Trim(kKeptBytes);
  return status;
}

// Whether groups are consecutive ranks and their size is a power of two. A single group may have any size.
bool HierarchicalCollectives::TreeFollowsBox() const {
  if (one_group()) return true;
  int rank = 0;
  for (const auto& members : groups_) {
    for (const int member : members) {
      if (member != rank++) return false;
    }
  }
  return even_ && IsPowerOfTwo(static_cast<int>(groups_[0].size()));
}

Status HierarchicalCollectives::AdaptiveSumOfBox(const View& in, const View& out, const std::vector<uint64_t>& tensors,
                                                 ddl_dtype dtype) {
  const auto local = static_cast<size_t>(pipeline_.rank());
  const auto size = static_cast<size_t>(pipeline_.size());
  const size_t bytes = DtypeSize(dtype);
  const ddl_dtype wide = WideDtype(dtype);
  const std::vector<Range> shards = SplitEvenly(in.count(), pipeline_.size());
  const Range shard = shards[local];

  // A rank reads its own piece in place if it is contiguous and already has the dtype in which vectors are combined.
  const View piece_of_in = in.Slice(shard.begin, shard.size());
  char* const kept = wide == dtype && size > 1 ? ContiguousMemory(piece_of_in) : nullptr;
  const size_t received = kept != nullptr ? size - 1 : size;
  const uint64_t raw_bytes = received * shard.size() * bytes;
  char* const raw =
      adaptive_memory_.Reserve(raw_bytes + (wide == dtype ? 0 : size * shard.size() * sizeof(float) + 64));
  std::vector<View> parts;
  std::vector<View> arrivals;
  std::vector<char*> vectors;
  for (size_t j = 0; j < size; ++j) {
    const bool stays = kept != nullptr && j == local;
    const size_t place = kept != nullptr && j > local ? j - 1 : j;
    vectors.push_back(stays ? kept : raw + place * shard.size() * bytes);
    parts.push_back(stays ? View(1) : BytesOf(in, shards[j]));
    arrivals.emplace_back(1, vectors[j], stays ? 0 : shard.size() * bytes);
  }
  DDL_RETURN_IF_ERROR(ShmAllToAll(pipeline_, parts, arrivals));
  if (wide != dtype) vectors = Widened(dtype, raw, raw + (raw_bytes + 63) / 64 * 64, size, shard.size());
  char* combined = nullptr;
  const Reduction sum{DDL_FLOAT64, DDL_SUM, 1.0};
  DDL_RETURN_IF_ERROR(CombineTree(
      wide, vectors, kept, TensorPartsOf(tensors, shard), tensors.size(), {},
      [&](const View& numbers) { return ShmAllReduce(pipeline_, numbers, numbers, sum); }, &combined));
  std::vector<View> results;
  for (const Range& range : shards) results.push_back(out.Slice(range.begin, range.size()));
  if (one_group() && wide == dtype) return ShmAllGather(pipeline_, View(bytes, combined, shard.size()), results);

  // Each outer dimension splits the piece again. All of them but the last must be powers of two, too.
  const auto groups = static_cast<int>(groups_.size());
  std::vector<int> dimensions = outer_;
  for (size_t d = 0; d + 1 < outer_.size(); ++d) {
    if (!IsPowerOfTwo(outer_[d])) dimensions = {groups};
  }
  struct Cut {
    std::unique_ptr<Ring> ring;
    std::vector<Range> chunks;  // of all elements
  };
  std::vector<Cut> cuts;
  Memory between;
  Range piece = shard;
  int stride = 1;
  for (const int length : dimensions) {
    const int position = group_ / stride % length;
    std::vector<int> ranks;
    Cut cut;
    std::vector<Range> sends;
    std::vector<Range> receives;
    const std::vector<Range> chunks = SplitEvenly(piece.size(), length);
    const Range mine = chunks[static_cast<size_t>(position)];
    const size_t wide_bytes = DtypeSize(wide);
    for (int p = 0; p < length; ++p) {
      const auto at = static_cast<uint64_t>(p);
      ranks.push_back(groups_[static_cast<size_t>(group_ + (p - position) * stride)][local]);
      cut.chunks.push_back({piece.begin + chunks[at].begin, piece.begin + chunks[at].end});
      sends.push_back(Bytes(chunks[at], wide_bytes));
      receives.push_back(Bytes({at * mine.size(), (at + 1) * mine.size()}, wide_bytes));
    }
    cut.ring = std::make_unique<Ring>(transport_, waiter_, ranks, position);
    Memory received = Allocate(static_cast<uint64_t>(length) * mine.size() * wide_bytes);
    const char* const whole = combined;
    DDL_RETURN_IF_ERROR(cut.ring->AllToAll(whole, sends, received.get(), receives));
    Copy(received.get() + receives[static_cast<size_t>(position)].begin,
         whole + sends[static_cast<size_t>(position)].begin, mine.size() * wide_bytes, Store::kCached);
    piece = cut.chunks[static_cast<size_t>(position)];
    cuts.push_back(std::move(cut));
    stride *= length;
    std::vector<char*> arrived;
    for (const Range& range : receives) arrived.push_back(received.get() + range.begin);
    between = std::move(received);
    const BoxNumber box{static_cast<size_t>(group_ / stride), static_cast<size_t>(groups / stride)};
    DDL_RETURN_IF_ERROR(CombineTree(
        wide, arrived, nullptr, TensorPartsOf(tensors, piece), tensors.size(), box,
        [&](const View& numbers) { return AllReduce(numbers, numbers, DDL_FLOAT64, DDL_SUM); }, &combined));
  }

  // Gather the results in the reverse order.
  const Memory result = Allocate(shard.size() * bytes);
  StoreResult(dtype, combined, result.get() + (piece.begin - shard.begin) * bytes, piece.size());
  for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut) {
    for (Range& chunk : cut->chunks) chunk = {chunk.begin - shard.begin, chunk.end - shard.begin};
    DDL_RETURN_IF_ERROR(cut->ring->AllGather(result.get(), cut->chunks, bytes));
  }
  return ShmAllGather(pipeline_, View(bytes, result.get(), shard.size()), results);
}

Status HierarchicalCollectives::AdaptiveSumOfAll(const View& in, const View& out, const std::vector<uint64_t>& tensors,
                                                 ddl_dtype dtype) {
  const auto size = static_cast<size_t>(transport_.size);
  const size_t bytes = DtypeSize(dtype);
  const std::vector<Range> ranges = SplitEvenly(in.count(), transport_.size);
  const Range own = ranges[static_cast<size_t>(transport_.rank)];

  Memory packed;
  const char* from = ContiguousMemory(in);
  if (from == nullptr) {
    packed = Allocate(in.bytes());
    CopyView(in, View(bytes, packed.get(), in.count()), Store::kCached);
    from = packed.get();
  }
  Memory raw = Allocate(size * own.size() * bytes);
  std::vector<Range> sends;
  std::vector<Range> receives;
  for (uint64_t r = 0; r < size; ++r) {
    sends.push_back(Bytes(ranges[r], bytes));
    receives.push_back(Bytes({r * own.size(), (r + 1) * own.size()}, bytes));
  }
  DDL_RETURN_IF_ERROR(AllToAll(from, sends, raw.get(), receives));
  Memory wide;
  if (WideDtype(dtype) != dtype) wide = Allocate(size * own.size() * sizeof(float));
  const std::vector<char*> vectors = Widened(dtype, raw.get(), wide.get(), size, own.size());
  char* combined = nullptr;
  DDL_RETURN_IF_ERROR(CombineTree(
      WideDtype(dtype), vectors, nullptr, TensorPartsOf(tensors, own), tensors.size(), {},
      [&](const View& numbers) { return AllReduce(numbers, numbers, DDL_FLOAT64, DDL_SUM); }, &combined));

  const Memory result = Allocate(own.size() * bytes);
  StoreResult(dtype, combined, result.get(), own.size());
  const View mine(bytes, result.get(), own.size());
  char* const to = ContiguousMemory(out);
  if (to != nullptr) return AllGather(mine, to, ranges, bytes);
  if (packed == nullptr) packed = Allocate(in.bytes());
  DDL_RETURN_IF_ERROR(AllGather(mine, packed.get(), ranges, bytes));
  CopyView(View(bytes, packed.get(), out.count()), out, Store::kCached);
  return {};
}

}  // namespace ddl
