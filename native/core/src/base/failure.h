// Failures as callers of the C ABI see them (ddl_failure).
#ifndef KERAS_DDL_CORE_BASE_FAILURE_H_
#define KERAS_DDL_CORE_BASE_FAILURE_H_

#include <atomic>
#include <string>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

// `status` as a ddl_failure, which refers to both arguments. REQUIRES: it is not OK.
inline ddl_failure FailureOf(const Status& status, const char* name) {
  return {status.code(),
          static_cast<uint32_t>(status.ranks().size()),
          status.ranks().data(),
          status.message().c_str(),
          name,
          -1};
}

// Calls `done` of a request for `status`. `name`: of the request; NULL: it has none.
inline void CallDone(void (*done)(void* user, const ddl_failure* failure), void* user, const char* name,
                     const Status& status) {
  const ddl_failure failure = FailureOf(status, name != nullptr ? name : "");
  done(user, status.ok() ? nullptr : &failure);
}

// A copy of a ddl_failure, shared by its holders.
class FailureCopy : public ddl_failure {
 public:
  // May throw if memory is short.
  explicit FailureCopy(const ddl_failure& from)
      : ddl_failure(from), ranks_(from.ranks, from.ranks + from.num_ranks), message_(from.message), name_(from.name) {
    ranks = ranks_.data();
    message = message_.c_str();
    name = name_.c_str();
  }
  FailureCopy(const FailureCopy&) = delete;
  FailureCopy& operator=(const FailureCopy&) = delete;

  void Hold() const { holders_.fetch_add(1); }
  void Release() const {
    if (holders_.fetch_sub(1) == 1) delete this;
  }

 private:
  ~FailureCopy() = default;

  const FailedRanks ranks_;
  const std::string message_;
  const std::string name_;
  mutable std::atomic<int> holders_{1};
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_FAILURE_H_
