#include "base/text.h"

namespace ddl {

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

std::string EncodeReason(const Status& status) {
  const bool kept = status.code() == DDL_UNAVAILABLE || status.code() == DDL_DEADLINE_EXCEEDED;
  const ddl_code code = kept ? status.code() : DDL_ABORTED;
  return static_cast<char>(code) + status.message();
}

Status DecodeReason(const std::string& reason) {
  if (reason.empty()) return {DDL_ABORTED, ""};
  return {static_cast<ddl_code>(reason[0]), reason.substr(1)};
}

}  // namespace ddl
