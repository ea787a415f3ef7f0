// Converts the failure of a transport's call to a Status.
#ifndef KERAS_DDL_CORE_NET_TRANSPORT_FAILURE_H_
#define KERAS_DDL_CORE_NET_TRANSPORT_FAILURE_H_

#include <string>
#include <utility>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

// Returns the failure of the last call of `transport`, which was `doing` something with `peer` (-1: no specific peer).
inline Status TransportFailure(const ddl_transport& transport, const std::string& doing, int peer = -1,
                               ddl_code code = DDL_ABORTED) {
  const int lost = transport.lost_rank != nullptr ? transport.lost_rank(transport.self) : -1;
  FailedRanks ranks;
  if (lost >= 0) ranks.push_back({lost, DDL_RANK_DIED});
  if (peer >= 0 && peer != lost) ranks.push_back({peer, DDL_RANK_NAMED});
  return {code, doing + (peer < 0 ? "" : " rank " + std::to_string(peer)) + ": " + transport.last_error(transport.self),
          std::move(ranks)};
}

}  // namespace ddl
#endif  // KERAS_DDL_CORE_NET_TRANSPORT_FAILURE_H_
