// Feedback: keeps the rounding errors of compressed sums, under a key, from one sum of the same tensors to the next
// (error feedback; hierarchy/hierarchical_collectives.h: Compressed). It is local to a rank: results are equal on all
// ranks whatever each rank keeps. One thread at a time: the executor's.
#ifndef KERAS_DDL_CORE_ENGINE_FEEDBACK_H_
#define KERAS_DDL_CORE_ENGINE_FEEDBACK_H_

#include <cstdint>
#include <list>
#include <string>
#include <vector>

namespace ddl {

class Feedback {
 public:
  // `limit`: bytes of memory; 0: 4 GiB.
  explicit Feedback(uint64_t limit) : limit_(limit != 0 ? limit : kDefaultLimit) {}

  // The errors under `key` of sums of `count` elements; empty at first, and when the count has changed. Valid until the
  // next call.
  std::vector<float>* Find(const std::string& key, uint64_t count);
  // Frees the least recently used entries until the rest is within the limit, but never the result of the last Find.
  // Returns a warning the first time that it frees an entry, else "".
  std::string Trim();

 private:
  static constexpr uint64_t kDefaultLimit = uint64_t{4} << 30;
  struct Entry {
    std::string key;
    uint64_t count;
    std::vector<float> errors;
  };

  const uint64_t limit_;
  std::list<Entry> entries_;  // the most recently used first; few: one for each bucket of a model
  bool warned_ = false;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_FEEDBACK_H_
