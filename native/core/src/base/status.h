// Status: what every internal function that can fail returns. Nothing in the core throws.
#ifndef KERAS_DDL_CORE_BASE_STATUS_H_
#define KERAS_DDL_CORE_BASE_STATUS_H_

#include <string>
#include <utility>

#include "ddl.h"

namespace ddl {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ddl_code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == DDL_OK; }
  ddl_code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  ddl_code code_ = DDL_OK;
  std::string message_;
};

#define DDL_RETURN_IF_ERROR(expression)        \
  do {                                         \
    ::ddl::Status ddl_status_ = (expression);  \
    if (!ddl_status_.ok()) return ddl_status_; \
  } while (false)

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_STATUS_H_
