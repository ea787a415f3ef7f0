#include "base/text.h"

#include <cstdlib>
#include <utility>

namespace ddl {
namespace {

constexpr char kSeparator = '\x1f';

}  // namespace

std::string FormatRanks(const std::vector<int>& ranks) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < ranks.size() && i < kShown; ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

std::string Truncate(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text;
  size_t end = limit - 3;
  // A UTF-8 continuation byte starts with bits 10: step back to the start of the character.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

// The code, ranges of successive ranks in one role such as "2:4-5,", a separator, and the message.
std::string EncodeReason(const Status& status, size_t limit) {
  const bool kept = status.code() == DDL_UNAVAILABLE || status.code() == DDL_DEADLINE_EXCEEDED;
  std::string reason(1, static_cast<char>(kept ? status.code() : DDL_ABORTED));
  const FailedRanks& ranks = status.ranks();
  for (size_t first = 0, end = 0; first < ranks.size(); first = end) {
    for (end = first + 1;
         end < ranks.size() && ranks[end].role == ranks[first].role && ranks[end].rank == ranks[end - 1].rank + 1;) {
      ++end;
    }
    const std::string run = std::to_string(ranks[first].role) + ":" + std::to_string(ranks[first].rank) + "-" +
                            std::to_string(ranks[end - 1].rank) + ",";
    if (reason.size() + run.size() > limit / 2) break;
    reason += run;
  }
  return Truncate(reason + kSeparator + status.message(), limit);
}

Status DecodeReason(const std::string& reason) {
  const size_t end = reason.find(kSeparator);
  if (end == std::string::npos) return {DDL_ABORTED, ""};
  FailedRanks ranks;
  for (const char* at = reason.c_str() + 1; *at != kSeparator;) {
    char* next = nullptr;
    const auto role = static_cast<uint32_t>(std::strtoul(at, &next, 10));
    const auto first = static_cast<int32_t>(std::strtol(next + 1, &next, 10));
    const auto last = static_cast<int32_t>(std::strtol(next + 1, &next, 10));
    for (int32_t rank = first; rank <= last; ++rank) ranks.push_back({rank, role});
    at = next + 1;
  }
  return {static_cast<ddl_code>(reason[0]), reason.substr(end + 1), std::move(ranks)};
}

}  // namespace ddl
