// Broadcast along a chain: each position forwards a segment as soon as it has it, so that all links are busy at once.
#include <algorithm>

#include "base/tags.h"
#include "net/ring.h"

namespace ddl {

Status Ring::Broadcast(int root, WireMemory& memory, char* data, uint64_t bytes) {
  if (size() == 1) return {};
  const int tag = kDataTag;
  const int distance = (position_ - root + size()) % size();
  const bool receives = distance > 0;
  const bool sends = distance < size() - 1;
  WireMessages incoming(transport_, memory, WireMessages::kReceives);
  WireMessages outgoing(transport_, memory, WireMessages::kSends);
  uint64_t posted = 0;
  for (uint64_t at = 0; at < bytes; at += kSegmentBytes) {
    for (; receives && posted < bytes && incoming.size() < kWindow; posted += kSegmentBytes) {
      DDL_RETURN_IF_ERROR(incoming.Start(previous(), tag, data + posted, std::min(kSegmentBytes, bytes - posted)));
    }
    if (receives) DDL_RETURN_IF_ERROR(Finish(&incoming));
    if (sends) DDL_RETURN_IF_ERROR(outgoing.Start(next(), tag, data + at, std::min(kSegmentBytes, bytes - at)));
  }
  while (outgoing.size() > 0) DDL_RETURN_IF_ERROR(Finish(&outgoing));
  return {};
}

}  // namespace ddl
