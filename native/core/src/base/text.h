// Text for messages: lists of ranks, truncation, and the form in which a status travels to other ranks.
#ifndef KERAS_DDL_CORE_BASE_TEXT_H_
#define KERAS_DDL_CORE_BASE_TEXT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "base/status.h"

namespace ddl {

// "0, 2, 5" or, for many, "0, 1, 2 and 61 more".
std::string FormatRanks(const std::vector<int>& ranks);

// `text` truncated to `limit` bytes at a UTF-8 boundary, ending in "..." when truncated.
std::string Truncate(const std::string& text, size_t limit);

// Why a rank gave up the communicator, in the form sent to the others: at most `limit` bytes without zero bytes; the
// message is truncated, and if need be ranks are left out. Two codes are preserved: DDL_UNAVAILABLE (a rank left) and
// DDL_DEADLINE_EXCEEDED. All others become DDL_ABORTED.
std::string EncodeReason(const Status& status, size_t limit);
Status DecodeReason(const std::string& reason);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_TEXT_H_
