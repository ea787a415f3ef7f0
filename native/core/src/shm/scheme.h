// Scheme: how a collective in shared memory runs. No scheme is always the fastest: that depends on the size, on whether
// the ranks' cores share a cache, and on how many ranks share a core. So the tuner measures them (tuner.h). Every
// scheme adds in the order of the ranks, so results do not depend on the choice.
#ifndef KERAS_DDL_CORE_SHM_SCHEME_H_
#define KERAS_DDL_CORE_SHM_SCHEME_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ddl.h"
#include "kernels/kernels.h"

namespace ddl {

// See collectives.h. A reduce_scatter and an all_gather through slots are kDirect.
enum class Algorithm { kDirect, kSplit, kCma };

struct Scheme {
  Algorithm algorithm;
  Store slot_store;      // how slots are filled; kCma ignores both stores
  Store result_store;    // how results are written
  uint32_t chunk_bytes;  // one step of the pipeline, at most a slot; kCma: bytes read from a rank at once

  uint64_t Encode() const {
    return static_cast<uint64_t>(chunk_bytes) << 8 | static_cast<uint64_t>(slot_store) << 4 |
           static_cast<uint64_t>(result_store) << 2 | static_cast<uint64_t>(algorithm);
  }
  static Scheme Decode(uint64_t code) {
    return {static_cast<Algorithm>(code & 3), static_cast<Store>(code >> 4 & 3), static_cast<Store>(code >> 2 & 3),
            static_cast<uint32_t>(code >> 8)};
  }
};

// Up to this size there is only one scheme, because choosing would take as long as the collective.
constexpr uint64_t UntunedBytes(ddl_kind kind) { return (kind == DDL_ALL_REDUCE ? 16 : 4) * uint64_t{1024}; }

// Returns the schemes worth trying for an array of `bytes` among `ranks` ranks, a good guess first. `kind`:
// DDL_ALL_REDUCE, DDL_REDUCE_SCATTER or DDL_ALL_GATHER. `reachable`: whether kCma works (GroupMemory::reachable).
// The list is never empty, and has one entry up to UntunedBytes.
std::vector<Scheme> CandidateSchemes(ddl_kind kind, uint64_t bytes, int ranks, size_t slot_bytes, bool reachable);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_SCHEME_H_
