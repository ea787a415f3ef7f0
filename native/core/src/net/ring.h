// Collectives between groups over the transport, on contiguous memory. One rank of each group takes part: `ranks` lists
// them in ring order, equally on all of them; `position` is this rank's position. All are COLLECTIVE over `ranks`.
#ifndef KERAS_DDL_CORE_NET_RING_H_
#define KERAS_DDL_CORE_NET_RING_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/range.h"
#include "base/status.h"
#include "base/waiter.h"
#include "ddl.h"
#include "kernels/views.h"
#include "net/wire.h"

namespace ddl {

// The numbers of the chunks that position p of P sends and receives in step s of P - 1 (Patarasuk & Yuan, 2009).
struct RingStep {
  size_t send;
  size_t receive;
};
// Sends chunk p - s - 1 and reduces chunk p - s - 2 as it arrives: in the end it owns chunk p, reduced over all.
RingStep ReduceScatterStep(int position, int size, int step);
// Sends chunk p - s and receives chunk p - s - 1, so that each chunk travels once around the ring.
RingStep AllGatherStep(int position, int size, int step);

class Ring {
 public:
  Ring(const ddl_transport& transport, Waiter& waiter, std::vector<int> ranks, int position);

  int size() const { return static_cast<int>(ranks_.size()); }
  int position() const { return position_; }

  // ring_all_gather.cc. (P-1)/P N bytes sent and received each (Patarasuk & Yuan, 2009). `chunks[p]`: the range of
  // `data` that position p starts from.
  Status AllGather(char* data, const std::vector<Range>& chunks, size_t element_bytes);

  // ring_all_to_all.cc. `sends[p]`: the bytes of `in` for position p; `receives[p]`: the bytes of `out` from position
  // p, as many as p sends. Each byte travels once, from its sender to its receiver. This position's own bytes are not
  // copied.
  Status AllToAll(const char* in, const std::vector<Range>& sends, char* out, const std::vector<Range>& receives);

  // ring_broadcast.cc. A pipelined chain from position `root` onward: N bytes sent by all but the last. `data` lies in
  // `memory`.
  Status Broadcast(int root, WireMemory& memory, char* data, uint64_t bytes);

 private:
  // Sends to the position `distance` ahead, and at the same time receives from the position `distance` behind, in
  // segments. on_segment(data, offset, bytes) is called for each received segment, in order.
  Status Exchange(int distance, const char* send, uint64_t send_bytes, uint64_t receive_bytes,
                  const std::function<void(const char* data, uint64_t offset, uint64_t bytes)>& on_segment);
  // Waits until the oldest of these messages has finished.
  Status Finish(WireMessages* messages);
  // REQUIRES: 0 <= distance <= size().
  size_t Ahead(int distance) const { return static_cast<size_t>((position_ + distance) % size()); }
  size_t Behind(int distance) const { return Ahead(size() - distance); }
  int next() const { return ranks_[Ahead(1)]; }
  int previous() const { return ranks_[Behind(1)]; }

  // Long enough that MPI uses the rendezvous protocol and waits for the receiver. Eager messages would pile up in the
  // memory of a slow receiver, at worst the whole tensor.
  static constexpr uint64_t kSegmentBytes = uint64_t{256} * 1024;
  // Messages in flight in each direction.
  static constexpr uint64_t kWindow = 8;

  const ddl_transport& transport_;
  Waiter& waiter_;
  const std::vector<int> ranks_;
  const int position_;
  WireMemory memory_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_NET_RING_H_
