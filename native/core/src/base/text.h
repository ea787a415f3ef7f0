// Text for messages: lists of ranks, truncation, and the form in which a status is sent to other ranks.
#ifndef KERAS_DDL_CORE_BASE_TEXT_H_
#define KERAS_DDL_CORE_BASE_TEXT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "base/status.h"

namespace ddl {

// Returns "0, 2, 5" or, for many, "0, 1, 2 and 61 more".
std::string FormatRanks(const std::vector<int>& ranks);

// Returns `text`, truncated to `limit` bytes at a UTF-8 boundary and ending in "..." if it is longer.
std::string Truncate(const std::string& text, size_t limit);

// Converts the reason why a rank broke the communicator to the form that is sent to the others, and back: at most
// `limit` bytes without zero bytes. The message is truncated, and ranks are left out if necessary. Two codes are kept:
// DDL_UNAVAILABLE (a rank left) and DDL_DEADLINE_EXCEEDED. All others become DDL_ABORTED.
std::string EncodeReason(const Status& status, size_t limit);
Status DecodeReason(const std::string& reason);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_TEXT_H_
