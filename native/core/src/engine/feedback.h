// Feedback: what rounding took away from compressed sums, kept under a key from one sum of the same tensors to the next
// (hierarchy/hierarchical_collectives.h: Compressed). Each rank's own affair: ranks that keep different things still
// get equal results. On the communication thread only.
#ifndef KERAS_DDL_CORE_ENGINE_FEEDBACK_H_
#define KERAS_DDL_CORE_ENGINE_FEEDBACK_H_

#include <cstdint>
#include <list>
#include <string>
#include <vector>

namespace ddl {

class Feedback {
 public:
  // `limit`: bytes that are kept; 0: 4 GiB.
  explicit Feedback(uint64_t limit) : limit_(limit != 0 ? limit : kDefaultLimit) {}

  // What is kept under `key` for a sum of `count` elements; empty if there is nothing, or something of another count.
  // Valid until the next call.
  std::vector<float>* Find(const std::string& key, uint64_t count);
  // Frees what has not been used for longest until the rest is within the limit, but never what was found last. Returns
  // a warning when it first does so, else "".
  std::string Trim();

 private:
  static constexpr uint64_t kDefaultLimit = uint64_t{4} << 30;
  struct Entry {
    std::string key;
    uint64_t count;
    std::vector<float> errors;
  };

  const uint64_t limit_;
  std::list<Entry> entries_;  // those used last first; few: one for each bucket of a model
  bool warned_ = false;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_FEEDBACK_H_
