#include "engine/feedback.h"

#include <algorithm>

namespace ddl {

std::vector<float>* Feedback::Find(const std::string& key, uint64_t count) {
  const auto at = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.key == key; });
  if (at == entries_.end()) {
    entries_.push_front({key, count, {}});
  } else {
    entries_.splice(entries_.begin(), entries_, at);
  }
  Entry& entry = entries_.front();
  if (entry.count != count) {
    entry.count = count;
    entry.errors.clear();
  }
  return &entry.errors;
}

std::string Feedback::Trim() {
  uint64_t bytes = 0;
  auto at = entries_.begin();
  while (at != entries_.end() && (at == entries_.begin() || bytes + at->errors.size() * sizeof(float) <= limit_)) {
    bytes += at->errors.size() * sizeof(float);
    ++at;
  }
  if (at == entries_.end()) return {};
  const std::string key = entries_.back().key;
  entries_.erase(at, entries_.end());
  if (warned_) return {};
  warned_ = true;
  return "compression: error feedback needs more than " + std::to_string(limit_) +
         " bytes, so the least recently used residuals are dropped, first those of '" + key +
         "'. Raise KERAS_DDL_FEEDBACK_BYTES, or give sums of the same tensors the same name.";
}

}  // namespace ddl
