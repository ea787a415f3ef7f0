// How segments travel around the ring; the algorithms are in ring_all_reduce.cc and ring_broadcast.cc.
#include "ring.h"

#include <algorithm>
#include <utility>

#include "control_channel.h"

namespace ddl {
namespace {

// Segments under way in each direction.
constexpr size_t kWindow = 4;

}  // namespace

std::vector<Range> SplitEvenly(uint64_t count, int parts) {
  const auto n = static_cast<uint64_t>(parts);
  std::vector<Range> ranges;
  uint64_t begin = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t end = begin + count / n + (i < count % n ? 1 : 0);
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

Ring::Ring(const ddl_transport& transport, Waiter& waiter, std::vector<int> ranks, int position)
    : transport_(transport), waiter_(waiter), ranks_(std::move(ranks)), position_(position) {}

Status Ring::Start(bool sending, int peer, char* data, uint64_t bytes, std::deque<void*>* operations) {
  void* operation = nullptr;
  const int tag = ControlChannel::kDataTag;
  const int code = sending ? transport_.isend(transport_.self, peer, tag, data, bytes, &operation)
                           : transport_.irecv(transport_.self, peer, tag, data, bytes, &operation);
  if (code != DDL_OK) {
    return {DDL_ABORTED, std::string(sending ? "sending to" : "receiving from") + " rank " + std::to_string(peer) +
                             ": " + transport_.last_error(transport_.self)};
  }
  operations->push_back(operation);
  return {};
}

Status Ring::Finish(int peer, std::deque<void*>* operations) {
  int code = DDL_OK;
  DDL_RETURN_IF_ERROR(waiter_.Until(
      [&] {
        int finished = 0;
        code = transport_.test(transport_.self, &operations->front(), &finished);
        return finished != 0 || code != DDL_OK;
      },
      [&] { return "a message between this rank and rank " + std::to_string(peer); }));
  if (code != DDL_OK) {
    return {DDL_ABORTED, "talking to rank " + std::to_string(peer) + ": " + transport_.last_error(transport_.self)};
  }
  operations->pop_front();
  return {};
}

Status Ring::Exchange(const char* send, uint64_t send_bytes, char* receive, uint64_t receive_bytes,
                      const std::function<void(const char* data, uint64_t offset, uint64_t bytes)>& on_segment) {
  const auto segment_at = [](uint64_t offset, uint64_t bytes) { return std::min(kSegmentBytes, bytes - offset); };
  if (receive == nullptr && receive_bytes > 0) scratch_.resize(kWindow * kSegmentBytes);
  const auto landing = [&](uint64_t offset) {
    return receive != nullptr ? receive + offset : scratch_.data() + (offset / kSegmentBytes) % kWindow * kSegmentBytes;
  };
  std::deque<void*> sends;
  std::deque<void*> receives;
  uint64_t sent = 0;
  uint64_t posted = 0;
  uint64_t received = 0;
  while (sent < send_bytes || received < receive_bytes) {
    while (posted < receive_bytes && receives.size() < kWindow) {
      const uint64_t bytes = segment_at(posted, receive_bytes);
      DDL_RETURN_IF_ERROR(Start(false, previous(), landing(posted), bytes, &receives));
      posted += bytes;
    }
    while (sent < send_bytes && sends.size() < kWindow) {
      const uint64_t bytes = segment_at(sent, send_bytes);
      DDL_RETURN_IF_ERROR(Start(true, next(), const_cast<char*>(send) + sent, bytes, &sends));
      sent += bytes;
    }
    if (!receives.empty()) {
      DDL_RETURN_IF_ERROR(Finish(previous(), &receives));
      const uint64_t bytes = segment_at(received, receive_bytes);
      if (on_segment) on_segment(landing(received), received, bytes);
      received += bytes;
    } else if (sends.size() == kWindow) {
      DDL_RETURN_IF_ERROR(Finish(next(), &sends));
    }
    // A full window of sends is worth a look even while receives are under way: what is done makes room.
    while (!sends.empty() && sends.size() == kWindow && sent < send_bytes) DDL_RETURN_IF_ERROR(Finish(next(), &sends));
  }
  while (!sends.empty()) DDL_RETURN_IF_ERROR(Finish(next(), &sends));
  return {};
}

}  // namespace ddl
