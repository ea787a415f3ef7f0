// Texts for people: ranks listed, what is too long cut, a status on its way to other ranks.
#ifndef KERAS_DDL_CORE_BASE_TEXT_H_
#define KERAS_DDL_CORE_BASE_TEXT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "base/status.h"

namespace ddl {

// "0, 2, 5" or, for many, "0, 1, 2 and 61 more".
std::string JoinRanks(const std::vector<int>& ranks);

// `text` cut to `limit` bytes at a UTF-8 boundary, ending in "..." when cut.
std::string Cut(const std::string& text, size_t limit);

// Why a rank gave the communicator up, as the others are told: a text without zero bytes, which may be cut anywhere
// after its first byte. Of the code only this survives: DDL_UNAVAILABLE (a rank left) stays, all else is DDL_ABORTED.
std::string EncodeReason(const Status& status);
Status DecodeReason(const std::string& reason);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_TEXT_H_
