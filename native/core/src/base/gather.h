// Gather: exchanges a fixed-size value between ranks before they have a communicator.
#ifndef KERAS_DDL_CORE_BASE_GATHER_H_
#define KERAS_DDL_CORE_BASE_GATHER_H_

#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

// Stores every rank's `mine` in `all`, by rank. COLLECTIVE over the ranks of the transport.
template <typename T>
Status Gather(const ddl_transport& transport, const T& mine, std::vector<T>* all) {
  static_assert(std::is_trivially_copyable_v<T>, "sent as bytes");
  all->resize(static_cast<size_t>(transport.size));
  if (transport.all_gather(transport.self, &mine, all->data(), sizeof mine) == DDL_OK) return {};
  return {DDL_INTERNAL,
          std::string("the ranks could not exchange start-up data: ") + transport.last_error(transport.self)};
}

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_GATHER_H_
