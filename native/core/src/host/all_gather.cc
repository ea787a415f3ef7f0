// The all_gather with which ranks meet. It names lost ranks, and callers can wait for it in slices.
#include <algorithm>
#include <cstring>

#include "host/transport.h"

namespace ddl {
namespace {

constexpr int kGatherTag = -1;  // the engine's are positive
constexpr auto kLookPause = std::chrono::milliseconds(100);

}  // namespace

Status HostTransport::AllGather(const void* in, void* out, size_t bytes, int timeout_ms, uint8_t* arrived) {
  Status status = GatherOn(in, out, bytes, timeout_ms, arrived);
  if (status.code() == DDL_DEADLINE_EXCEEDED) return status;
  for (Operation*& operation : gather_) {
    // Only after a failure is there something left.
    if (operation != nullptr) DDL_RETURN_IF_ERROR(Cancel(&operation));
  }
  gather_.clear();
  return status;
}

Status HostTransport::GatherOn(const void* in, void* out, size_t bytes, int timeout_ms, uint8_t* arrived) {
  const auto begun = Clock::now();
  const auto size = static_cast<size_t>(size_);
  if (gather_.empty()) {
    gather_.assign(2 * size, nullptr);
    for (int peer = 0; peer < size_; ++peer) {
      const auto index = static_cast<size_t>(peer);
      char* const place = static_cast<char*>(out) + index * bytes;
      if (peer != rank_) {
        DDL_RETURN_IF_ERROR(Irecv(peer, kGatherTag, place, bytes, &gather_[index]));
        DDL_RETURN_IF_ERROR(Isend(peer, kGatherTag, in, bytes, &gather_[size + index]));
      } else if (bytes > 0) {
        std::memmove(place, in, bytes);
      }
    }
  }
  auto look = begun + kLookPause;
  for (;;) {
    DDL_RETURN_IF_ERROR(Progress());
    for (Operation*& operation : gather_) {
      bool finished = true;
      if (operation != nullptr && operation->finished) DDL_RETURN_IF_ERROR(Test(&operation, &finished));
    }
    if (std::all_of(gather_.begin(), gather_.end(), [](const Operation* each) { return each == nullptr; })) return {};
    const auto now = Clock::now();
    if (now >= look) {
      DDL_RETURN_IF_ERROR(LookForGone());
      look = now + kLookPause;
    }
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - begun).count();
    if (timeout_ms >= 0 && waited >= timeout_ms) {
      for (size_t peer = 0; arrived != nullptr && peer < size; ++peer) arrived[peer] = gather_[peer] == nullptr;
      return {DDL_DEADLINE_EXCEEDED, "not all ranks have arrived"};
    }
    const auto left = timeout_ms < 0 ? kLookPause.count() : timeout_ms - waited;
    Wait(HasUnsent() ? 1 : static_cast<int>(std::min<int64_t>(left, kLookPause.count())));
  }
}

Status HostTransport::LookForGone() {
  for (int number = 0; number < size_; ++number) {
    Peer& peer = peers_[static_cast<size_t>(number)];
    if (number == rank_ || !peer.heard || streams_.Has(number)) continue;
    Delivery delivery = Delivery::kSent;
    DDL_RETURN_IF_ERROR(datagrams_.Send(number, {kPing, rank_, 0, 0, 0, 0}, nullptr, 0, &delivery));
    peer.gone = peer.gone || delivery == Delivery::kAbsent;
  }
  // What one has sent before it went is there.
  for (bool more = true; more;) DDL_RETURN_IF_ERROR(Progress(&more));
  for (int number = 0; number < size_; ++number) {
    const Operation* const receive = gather_[static_cast<size_t>(number)];
    if (peers_[static_cast<size_t>(number)].gone && receive != nullptr && !receive->finished) {
      return {DDL_ABORTED,
              "rank " + std::to_string(number) + " has left or died while all ranks exchanged data",
              {{number, DDL_RANK_DIED}}};
    }
  }
  return {};
}

}  // namespace ddl
