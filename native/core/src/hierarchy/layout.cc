#include "hierarchy/layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/gather.h"
#include "base/text.h"
#include "common/hash.h"
#include "shm/group_memory.h"

namespace ddl {
namespace {

constexpr uint64_t kDefaultStagingBytes = 64 * 1024 * 1024;
// Bytes of a pipeline step: large enough to hide the cost of the flags, small enough for four slots per rank to stay in
// cache.
constexpr uint64_t kLargestSlot = 512 * 1024;
constexpr uint64_t kSmallestSlot = 16 * 1024;

// What a rank sends to the others. `text` is for messages. Even if it is truncated, `hash` tells two layouts apart.
struct Record {
  uint32_t impossible;  // if not 0, `text` says why
  uint64_t hash;
  char text[256];
};

// Exchanged before anything else. Its size never changes, so that even very different builds can report their versions.
struct VersionRecord {
  uint32_t abi_version;
  uint32_t reserved[15];
};
static_assert(sizeof(VersionRecord) == 64, "every build must exchange the same number of bytes");

// Whether `options` are valid for `size` ranks; see ddl.h.
Status CheckPossible(const ddl_options& options, int size) {
  if (!(options.lost_after_s == 0 || (options.lost_after_s >= 1 && std::isfinite(options.lost_after_s)))) {
    return {DDL_INVALID_ARGUMENT,
            "lost_after_s: must be 0 or at least 1 second. Received: " + std::to_string(options.lost_after_s) +
                ". Set KERAS_DDL_LOST_AFTER_SECONDS to 0 (never) or to 1 or more."};
  }
  int64_t groups = 0;
  for (int r = 0; r < size; ++r) {
    const int leader = options.group[r];
    if (leader < 0 || leader > r || options.group[leader] != leader) {
      return {DDL_INVALID_ARGUMENT, "group: each entry must be the lowest rank of its group. Received: group[" +
                                        std::to_string(r) + "] = " + std::to_string(leader) + "."};
    }
    groups += leader == r ? 1 : 0;
  }
  int64_t product = 1;
  for (uint32_t d = 0; d < static_cast<uint32_t>(options.num_outer); ++d) {
    product = options.outer[d] < 1 ? 0 : product * options.outer[d];
  }
  if (options.num_outer == 0 || product == groups) return {};
  return {DDL_INVALID_ARGUMENT, "outer: the dimensions must be 1 or more and their product the number of groups, " +
                                    std::to_string(groups) + ". Received: a product of " + std::to_string(product) +
                                    "."};
}

std::string Describe(const ddl_options& options, int size) {
  std::ostringstream text;
  text << (options.num_outer > 0 ? "a box of " : "no box");
  for (uint32_t d = 0; d < options.num_outer; ++d) text << (d > 0 ? "x" : "") << options.outer[d];
  text << ", slots of " << SlotBytes(options, size) << " bytes" << (options.staged_only != 0 ? " only" : "")
       << ", hosts ";
  if (options.lost_after_s > 0) {
    text << "lost after " << options.lost_after_s << " s";
  } else {
    text << "not watched";
  }
  text << ", groups";  // last, because with many ranks the list is truncated
  for (int r = 0; r < size; ++r) text << " " << options.group[r];
  return text.str();
}

Status AgreeOnVersion(const ddl_transport& transport) {
  const VersionRecord mine{DDL_ABI_VERSION, {}};
  std::vector<VersionRecord> records;
  DDL_RETURN_IF_ERROR(Gather(transport, mine, &records));
  std::map<uint32_t, std::vector<int>> ranks_by_version;
  for (int rank = 0; rank < transport.size; ++rank) {
    ranks_by_version[records[static_cast<size_t>(rank)].abi_version].push_back(rank);
  }
  if (ranks_by_version.size() == 1) return {};
  std::string received;
  for (const auto& [version, ranks] : ranks_by_version) {
    received += std::string(received.empty() ? "" : "; ") + "native ABI " + std::to_string(version) + " on rank(s) " +
                FormatRanks(ranks);
  }
  return {DDL_FAILED_PRECONDITION,
          "all ranks must run the same keras_ddl. Received: " + received + ". Install one version on every host."};
}

}  // namespace

uint64_t SlotBytes(const ddl_options& options, int size) {
  std::vector<int> members(static_cast<size_t>(size), 0);
  for (int r = 0; r < size; ++r) ++members[static_cast<size_t>(options.group[r])];
  const auto largest = static_cast<uint64_t>(*std::max_element(members.begin(), members.end()));
  const uint64_t staging = options.staging_bytes != 0 ? options.staging_bytes : kDefaultStagingBytes;
  const uint64_t slot = std::min(kLargestSlot, staging / (largest * kSlots)) / 4096 * 4096;
  // A reduce-scatter needs a cache line of a slot for every rank.
  const uint64_t lines = (64 * largest + 4095) / 4096 * 4096;
  return std::max({kSmallestSlot, slot, lines});
}

Status AgreeOnLayout(const ddl_transport& transport, const ddl_options& options) {
  DDL_RETURN_IF_ERROR(AgreeOnVersion(transport));
  const Status possible = CheckPossible(options, transport.size);
  const std::string text = possible.ok() ? Describe(options, transport.size) : possible.message();
  Record mine{possible.ok() ? 0u : 1u, Hash(text), {}};
  const std::string shown = Truncate(text, sizeof mine.text - 1);
  std::memcpy(mine.text, shown.c_str(), shown.size() + 1);
  std::vector<Record> records;
  DDL_RETURN_IF_ERROR(Gather(transport, mine, &records));
  std::map<uint64_t, std::vector<int>> ranks_by_hash;
  for (int rank = 0; rank < transport.size; ++rank) {
    const Record& record = records[static_cast<size_t>(rank)];
    if (record.impossible != 0) {
      return {DDL_INVALID_ARGUMENT, std::string(record.text) + " (on rank " + std::to_string(rank) + ")"};
    }
    ranks_by_hash[record.hash].push_back(rank);
  }
  if (ranks_by_hash.size() == 1) return {};
  std::string received;
  for (const auto& [hash, ranks] : ranks_by_hash) {
    received += std::string(received.empty() ? "" : "; ") + records[static_cast<size_t>(ranks[0])].text +
                " on rank(s) " + FormatRanks(ranks);
  }
  return {DDL_FAILED_PRECONDITION, "all ranks must be given the same groups, box and settings. Received: " + received +
                                       ". Start every rank with the same mode and KERAS_DDL_* variables."};
}

}  // namespace ddl
