#include "layout.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "coordinator.h"
#include "group_memory.h"
#include "message.h"

namespace ddl {
namespace {

constexpr uint64_t kDefaultStagingBytes = 64 * 1024 * 1024;
// One step of the pipeline: large enough to hide the flags, small enough for four of them per rank to stay in cache.
constexpr uint64_t kLargestSlot = 512 * 1024;
constexpr uint64_t kSmallestSlot = 16 * 1024;

// What a rank shows the others. `text` says it to people; where it is cut, `hash` still tells two layouts apart.
struct Card {
  uint32_t abi_version;
  uint32_t impossible;  // `text` says why
  uint64_t hash;
  char text[256];
};

// Whether `options` can be those of `size` ranks; see ddl.h.
Status CheckPossible(const ddl_options& options, int size) {
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
  std::string text = "groups";
  for (int r = 0; r < size; ++r) text += " " + std::to_string(options.group[r]);
  text += options.num_outer > 0 ? " in a box of " : "";
  for (uint32_t d = 0; d < options.num_outer; ++d) text += (d > 0 ? "x" : "") + std::to_string(options.outer[d]);
  text += ", slots of " + std::to_string(SlotBytes(options, size)) + " bytes, hosts ";
  return text + (options.lost_after_s > 0 ? "watched" : "not watched");
}

uint64_t Hash(const std::string& text) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
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
  const Status possible = CheckPossible(options, transport.size);
  const std::string text = possible.ok() ? Describe(options, transport.size) : possible.message();
  Card mine{DDL_ABI_VERSION, possible.ok() ? 0u : 1u, Hash(text), {}};
  const std::string shown = Cut(text, sizeof mine.text - 1);
  std::memcpy(mine.text, shown.c_str(), shown.size() + 1);
  std::vector<Card> cards(static_cast<size_t>(transport.size));
  if (transport.all_gather(transport.self, &mine, cards.data(), sizeof mine) != DDL_OK) {
    return {DDL_INTERNAL, std::string("the ranks could not meet: ") + transport.last_error(transport.self)};
  }
  std::map<uint64_t, std::vector<int>> ranks_by_hash;
  for (int rank = 0; rank < transport.size; ++rank) {
    const Card& card = cards[static_cast<size_t>(rank)];
    if (card.abi_version != DDL_ABI_VERSION) {
      return {DDL_FAILED_PRECONDITION, "all ranks must run the same keras_ddl. Received: rank " + std::to_string(rank) +
                                           " runs native ABI " + std::to_string(card.abi_version) + ", rank " +
                                           std::to_string(transport.rank) + " runs " + std::to_string(DDL_ABI_VERSION) +
                                           ". Install one version on every host."};
    }
    if (card.impossible != 0) {
      return {DDL_INVALID_ARGUMENT, std::string(card.text) + " (on rank " + std::to_string(rank) + ")"};
    }
    ranks_by_hash[card.hash].push_back(rank);
  }
  if (ranks_by_hash.size() == 1) return {};
  std::string received;
  for (const auto& [hash, ranks] : ranks_by_hash) {
    received += std::string(received.empty() ? "" : "; ") + cards[static_cast<size_t>(ranks[0])].text + " on rank(s) " +
                JoinRanks(ranks);
  }
  return {DDL_FAILED_PRECONDITION, "all ranks must be given the same groups, box and settings. Received: " + received +
                                       ". Start every rank with the same mode and KERAS_DDL_* variables."};
}

}  // namespace ddl
