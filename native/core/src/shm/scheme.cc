#include "shm/scheme.h"

#include <algorithm>

namespace ddl {
namespace {

constexpr uint32_t kKilobyte = 1024;
constexpr uint64_t kMegabyte = 1024 * 1024;

constexpr Algorithm kDirect = Algorithm::kDirect;
constexpr Algorithm kSplit = Algorithm::kSplit;
constexpr Store kC = Store::kCached;
constexpr Store kS = Store::kStreaming;
constexpr Store kR = Store::kRepMovsb;

std::vector<Scheme> AllReduceThroughSlots(uint64_t bytes, int ranks) {
  std::vector<Scheme> schemes;
  if (ranks == 2) {
    // Results larger than the caches are no longer there when they are read, and streaming saves reading lines first.
    if (bytes < kMegabyte)
      return {{kSplit, kR, kC, 256},
              {kDirect, kR, kC, 128},
              {kSplit, kR, kC, 128},
              {kSplit, kR, kC, 64},
              {kSplit, kS, kC, 256}};
    if (bytes < 16 * kMegabyte)
      return {{kSplit, kR, kC, 256}, {kSplit, kR, kR, 256},  {kSplit, kR, kS, 256},
              {kSplit, kS, kS, 256}, {kDirect, kR, kC, 128}, {kSplit, kR, kC, 512}};
    return {{kDirect, kR, kS, 128},
            {kDirect, kR, kC, 128},
            {kSplit, kR, kS, 512},
            {kDirect, kR, kS, 256},
            {kSplit, kS, kS, 256}};
  }
  // Direct reads every slot but waits only once per step, which matters when several ranks share a core.
  const Store result = bytes < 4 * kMegabyte ? kC : kS;
  schemes = {{kSplit, kR, result, 512}, {kSplit, kR, kR, 512}, {kDirect, kR, result, 128}};
  if (bytes >= 512 * kKilobyte) {
    schemes.push_back({kSplit, kS, result, 512});
    schemes.push_back({kSplit, kR, result, 256});
    schemes.push_back({kDirect, kR, result, 512});
  }
  return schemes;
}

// The caller reads the result of a reduction next, so it is not streamed.
std::vector<Scheme> ReduceScatterThroughSlots() {
  return {{kDirect, kR, kC, 512}, {kDirect, kS, kC, 512}, {kDirect, kR, kC, 128}};
}

std::vector<Scheme> AllGatherThroughSlots(uint64_t bytes) {
  const Store result = bytes < 4 * kMegabyte ? kC : kS;
  return {{kDirect, kR, result, 512}, {kDirect, kS, result, 512}, {kDirect, kR, kR, 512}};
}

// If two schemes differ only in their chunks, and both chunks are longer than all that a rank moves at once, the
// schemes are the same, and one is enough.
void DropEqual(ddl_kind kind, uint64_t bytes, int ranks, std::vector<Scheme>& schemes) {
  const auto moved = [&](const Scheme& scheme) {
    const bool whole = kind == DDL_REDUCE_SCATTER && scheme.algorithm == kDirect;  // a slot has a part for every rank
    return whole ? bytes : bytes / static_cast<uint64_t>(ranks);
  };
  const std::vector<Scheme> all = schemes;
  const auto is_spare = [&](const Scheme& scheme) {
    return std::any_of(all.begin(), all.end(), [&](const Scheme& other) {
      Scheme same = other;
      same.chunk_bytes = scheme.chunk_bytes;
      return same.Encode() == scheme.Encode() && other.chunk_bytes < scheme.chunk_bytes &&
             other.chunk_bytes >= moved(other);
    });
  };
  schemes.erase(std::remove_if(schemes.begin(), schemes.end(), is_spare), schemes.end());
}

}  // namespace

std::vector<Scheme> CandidateSchemes(ddl_kind kind, uint64_t bytes, int ranks, size_t slot_bytes, bool reachable) {
  std::vector<Scheme> schemes;
  const bool tuned = bytes > UntunedBytes(kind);
  if (kind == DDL_ALL_REDUCE) {
    schemes = tuned ? AllReduceThroughSlots(bytes, ranks) : std::vector<Scheme>{{kDirect, kR, kC, 64}};
  } else {
    schemes = kind == DDL_REDUCE_SCATTER ? ReduceScatterThroughSlots() : AllGatherThroughSlots(bytes);
    if (!tuned) schemes.resize(1);
  }
  for (Scheme& scheme : schemes) {
    scheme.chunk_bytes =
        static_cast<uint32_t>(std::min<uint64_t>(scheme.chunk_bytes * uint64_t{kKilobyte}, slot_bytes));
  }
  if (!tuned) return schemes;
  // Data should still be in the second-level cache when it is added, but larger chunks need fewer system calls.
  const uint32_t shortest = (kind == DDL_ALL_REDUCE ? 64 : kind == DDL_REDUCE_SCATTER ? 128 : 256) * kKilobyte;
  for (const uint32_t chunk : {shortest, 2 * shortest}) {
    if (reachable) schemes.push_back({Algorithm::kCma, kC, kC, chunk});
  }
  if (kind != DDL_ALL_REDUCE) DropEqual(kind, bytes, ranks, schemes);
  return schemes;
}

}  // namespace ddl
