// KnownCollectives: collectives that are repeated, and the short ids by which ranks and coordinator then name them.
// When all ranks have announced exactly the same collective for the second time, the coordinator's decision assigns an
// id, which every rank keeps. From then on an announcement is 13 bytes. A collective that comes once, such as one with
// a numbered name, takes no id.
#ifndef KERAS_DDL_CORE_CONTROL_KNOWN_COLLECTIVES_H_
#define KERAS_DDL_CORE_CONTROL_KNOWN_COLLECTIVES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/message.h"

namespace ddl {

// Returns an announcement without its step, as bytes.
std::string ContentsOf(const Announcement& announcement);

class KnownCollectives {
 public:
  // Ids are 1 to this; later collectives are always announced in full.
  static constexpr size_t kMax = 4096;

  // 0: none.
  uint32_t IdOf(const Announcement& announcement) const {
    if (ids_.empty() || !announcement.splits.empty()) return 0;
    const auto at = ids_.find(ContentsOf(announcement));
    return at == ids_.end() ? 0 : at->second;
  }
  // REQUIRES: Add has returned the id.
  const std::shared_ptr<const Announcement>& At(uint32_t id) const { return known_[id - 1]; }
  bool full() const { return known_.size() >= kMax; }
  // Returns the next id, equal on every rank because ids follow the order of decisions.
  uint32_t Add(const Announcement& announcement) {
    known_.push_back(std::make_shared<const Announcement>(announcement));
    const auto id = static_cast<uint32_t>(known_.size());
    ids_.emplace(ContentsOf(announcement), id);
    return id;
  }

 private:
  std::vector<std::shared_ptr<const Announcement>> known_;
  std::unordered_map<std::string, uint32_t> ids_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_KNOWN_COLLECTIVES_H_
