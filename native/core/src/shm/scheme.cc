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
constexpr Store kL = Store::kRepMovsb;

std::vector<Scheme> AllReduceThroughSlots(uint64_t bytes, int ranks) {
  std::vector<Scheme> schemes;
  if (ranks == 2) {
    // Results beyond the caches are not found there by their reader, and streaming them saves reading them first.
    if (bytes < kMegabyte)
      return {{kSplit, kL, kC, 256},
              {kDirect, kL, kC, 128},
              {kSplit, kL, kC, 128},
              {kSplit, kL, kC, 64},
              {kSplit, kS, kC, 256}};
    if (bytes < 16 * kMegabyte)
      return {{kSplit, kL, kC, 256}, {kSplit, kL, kL, 256},  {kSplit, kL, kS, 256},
              {kSplit, kS, kS, 256}, {kDirect, kL, kC, 128}, {kSplit, kL, kC, 512}};
    return {{kDirect, kL, kS, 128},
            {kDirect, kL, kC, 128},
            {kSplit, kL, kS, 512},
            {kDirect, kL, kS, 256},
            {kSplit, kS, kS, 256}};
  }
  // Direct reads every slot but waits only once per step, which matters when several ranks share a core.
  const Store result = bytes < 4 * kMegabyte ? kC : kS;
  schemes = {{kSplit, kL, result, 512}, {kSplit, kL, kL, 512}, {kDirect, kL, result, 128}};
  if (bytes >= 512 * kKilobyte) {
    schemes.push_back({kSplit, kS, result, 512});
    schemes.push_back({kSplit, kL, result, 256});
    schemes.push_back({kDirect, kL, result, 512});
  }
  return schemes;
}

// A rank writes to its slot what the others lack, and reads what it lacks. The reduction is not streamed: it is what
// the caller reads next.
std::vector<Scheme> ReduceScatterThroughSlots(uint64_t bytes) {
  std::vector<Scheme> schemes = {{kDirect, kL, kC, 512}, {kDirect, kL, kC, 128}};
  if (bytes >= 256 * kKilobyte) schemes.push_back({kDirect, kS, kC, 512});
  return schemes;
}

std::vector<Scheme> AllGatherThroughSlots(uint64_t bytes) {
  const Store result = bytes < 4 * kMegabyte ? kC : kS;
  std::vector<Scheme> schemes = {{kDirect, kL, result, 512}, {kDirect, kL, kL, 512}, {kDirect, kL, result, 128}};
  if (bytes >= 256 * kKilobyte) schemes.push_back({kDirect, kS, result, 512});
  return schemes;
}

}  // namespace

std::vector<Scheme> CandidateSchemes(ddl_kind kind, uint64_t bytes, int ranks, size_t slot_bytes, bool reachable) {
  std::vector<Scheme> schemes;
  const bool tuned = bytes > kUntunedBytes;
  if (kind == DDL_ALL_REDUCE) {
    schemes = tuned ? AllReduceThroughSlots(bytes, ranks) : std::vector<Scheme>{{kDirect, kL, kC, 64}};
  } else {
    schemes = kind == DDL_REDUCE_SCATTER ? ReduceScatterThroughSlots(bytes) : AllGatherThroughSlots(bytes);
    if (!tuned) schemes.resize(1);
  }
  for (Scheme& scheme : schemes) {
    scheme.chunk_bytes =
        static_cast<uint32_t>(std::min<uint64_t>(scheme.chunk_bytes * uint64_t{kKilobyte}, slot_bytes));
  }
  if (!reachable || !tuned) return schemes;
  // What was read should still be in the second-level cache when it is added. What is only moved may be longer.
  for (const uint32_t kilobytes : {64, 128}) {
    schemes.push_back({Algorithm::kCma, kC, kC, (kind == DDL_ALL_GATHER ? 4 : 1) * kilobytes * kKilobyte});
  }
  return schemes;
}

}  // namespace ddl
