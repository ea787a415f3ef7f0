// Broadcast along a chain: each position forwards a segment as soon as it has it, so that all links are busy at once.
#include <algorithm>

#include "ring.h"

namespace ddl {

Status Ring::Broadcast(int root, char* data, uint64_t bytes) {
  if (size() == 1) return {};
  const int distance = (position_ - root + size()) % size();
  const bool receives = distance > 0;
  const bool sends = distance < size() - 1;
  std::deque<void*> incoming;
  std::deque<void*> outgoing;
  for (uint64_t at = 0; at < bytes; at += kSegmentBytes) {
    const uint64_t n = std::min(kSegmentBytes, bytes - at);
    if (receives) {
      DDL_RETURN_IF_ERROR(Start(false, previous(), data + at, n, &incoming));
      DDL_RETURN_IF_ERROR(Finish(previous(), &incoming));
    }
    if (sends) DDL_RETURN_IF_ERROR(Start(true, next(), data + at, n, &outgoing));
  }
  while (!outgoing.empty()) DDL_RETURN_IF_ERROR(Finish(next(), &outgoing));
  return {};
}

}  // namespace ddl
