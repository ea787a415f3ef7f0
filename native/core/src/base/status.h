// Status, the return value of every internal function that can fail. Nothing in the core throws.
#ifndef KERAS_DDL_CORE_BASE_STATUS_H_
#define KERAS_DDL_CORE_BASE_STATUS_H_

#include <string>
#include <utility>
#include <vector>

#include "ddl.h"

namespace ddl {

// The ranks that a failure concerns, and how.
using FailedRanks = std::vector<ddl_failed_rank>;

// Returns `ranks`, all in one role.
inline FailedRanks InRole(ddl_rank_role role, const std::vector<int>& ranks) {
  FailedRanks failed;
  for (const int rank : ranks) failed.push_back({rank, role});
  return failed;
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ddl_code code, std::string message, FailedRanks ranks = {})
      : code_(code), message_(std::move(message)), ranks_(std::move(ranks)) {}

  bool ok() const { return code_ == DDL_OK; }
  ddl_code code() const { return code_; }
  const std::string& message() const { return message_; }
  const FailedRanks& ranks() const { return ranks_; }

  // Returns the same failure with another message, and more ranks.
  Status Reworded(std::string message, const FailedRanks& more = {}) const {
    Status status(code_, std::move(message), ranks_);
    status.ranks_.insert(status.ranks_.end(), more.begin(), more.end());
    return status;
  }

 private:
  ddl_code code_ = DDL_OK;
  std::string message_;
  FailedRanks ranks_;
};

#define DDL_RETURN_IF_ERROR(expression)        \
  do {                                         \
    ::ddl::Status ddl_status_ = (expression);  \
    if (!ddl_status_.ok()) return ddl_status_; \
  } while (false)

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_STATUS_H_
