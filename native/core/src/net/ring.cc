// How segments travel around the ring; the algorithms are in ring_all_gather.cc, ring_all_to_all.cc
// and ring_broadcast.cc.
#include "net/ring.h"

#include <algorithm>
#include <utility>

#include "base/tags.h"

namespace ddl {

namespace {

size_t Wrap(int position, int size) { return static_cast<size_t>(((position % size) + size) % size); }

}  // namespace

RingStep AllGatherStep(int position, int size, int step) {
  return {Wrap(position - step, size), Wrap(position - step - 1, size)};
}

RingStep ReduceScatterStep(int position, int size, int step) { return AllGatherStep(position - 1, size, step); }

Ring::Ring(const ddl_transport& transport, Waiter& waiter, std::vector<int> ranks, int position)
    : transport_(transport), waiter_(waiter), ranks_(std::move(ranks)), position_(position) {}

Status Ring::Finish(WireMessages* messages) {
  Status status;
  bool finished = false;
  DDL_RETURN_IF_ERROR(waiter_.Until(
      [&] {
        status = messages->TakeFinished(&finished);
        return finished || !status.ok();
      },
      [&] { return messages->Describe(); }));
  return status;
}

Status Ring::Exchange(int distance, const char* send, uint64_t send_bytes, uint64_t receive_bytes,
                      const std::function<void(const char* data, uint64_t offset, uint64_t bytes)>& on_segment) {
  const auto segment_at = [](uint64_t offset, uint64_t bytes) { return std::min(kSegmentBytes, bytes - offset); };
  const int to = ranks_[Ahead(distance)];
  const int from = ranks_[Behind(distance)];
  char* const memory = memory_.Reserve(2 * kWindow * kSegmentBytes);
  const auto place = [&](uint64_t offset) { return memory + offset / kSegmentBytes % kWindow * kSegmentBytes; };
  const auto leaving = [&](uint64_t offset) { return place(offset) + kWindow * kSegmentBytes; };
  WireMessages sends(transport_, memory_, WireMessages::kSends);
  WireMessages receives(transport_, memory_, WireMessages::kReceives);
  uint64_t sent = 0;
  uint64_t posted = 0;
  uint64_t received = 0;
  while (sent < send_bytes || received < receive_bytes) {
    while (posted < receive_bytes && receives.size() < kWindow) {
      const uint64_t bytes = segment_at(posted, receive_bytes);
      DDL_RETURN_IF_ERROR(receives.Start(from, kDataTag, place(posted), bytes));
      posted += bytes;
    }
    while (sent < send_bytes && sends.size() < kWindow) {
      const uint64_t bytes = segment_at(sent, send_bytes);
      Copy(leaving(sent), send + sent, bytes, Store::kCached);
      DDL_RETURN_IF_ERROR(sends.Start(to, kDataTag, leaving(sent), bytes));
      sent += bytes;
    }
    if (receives.size() > 0) {
      DDL_RETURN_IF_ERROR(Finish(&receives));
      const uint64_t bytes = segment_at(received, receive_bytes);
      on_segment(place(received), received, bytes);
      received += bytes;
    }
    // Test a full window of sends even while receives are in flight: those that are done make room.
    if (sends.size() == kWindow) DDL_RETURN_IF_ERROR(Finish(&sends));
  }
  while (sends.size() > 0) DDL_RETURN_IF_ERROR(Finish(&sends));
  return {};
}

}  // namespace ddl
