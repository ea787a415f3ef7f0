#include "control/channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/tags.h"
#include "base/waiter.h"
#include "shm/doorbell.h"

namespace ddl {
namespace {

// In the length of a piece: another piece of the message follows.
constexpr uint32_t kMorePieces = 1u << 31;
// Longer messages travel in pieces, several of which fit into a mailbox: one is read while the next is written.
constexpr size_t kPieceBytes = kMailboxBytes / 4;

void RingCopyIn(Mailbox& box, uint64_t at, const void* from, size_t bytes) {
  const size_t offset = at % kMailboxBytes;
  const size_t first = std::min(bytes, kMailboxBytes - offset);
  std::memcpy(box.data + offset, from, first);
  std::memcpy(box.data, static_cast<const char*>(from) + first, bytes - first);
}

void RingCopyOut(const Mailbox& box, uint64_t at, void* to, size_t bytes) {
  const size_t offset = at % kMailboxBytes;
  const size_t first = std::min(bytes, kMailboxBytes - offset);
  std::memcpy(to, box.data + offset, first);
  std::memcpy(static_cast<char*>(to) + first, box.data, bytes - first);
}

}  // namespace

bool MailboxPut(Mailbox& box, const MailboxPiece& piece) {
  const auto size = static_cast<uint32_t>(piece.bytes.size());
  const uint32_t header = piece.more ? size | kMorePieces : size;
  const uint64_t head = box.head.load(std::memory_order_relaxed);
  const uint64_t tail = box.tail.load(std::memory_order_acquire);
  if (kMailboxBytes - (head - tail) < size + sizeof header) return false;
  RingCopyIn(box, head, &header, sizeof header);
  RingCopyIn(box, head + sizeof header, piece.bytes.data(), size);
  box.head.store(head + sizeof header + size, std::memory_order_release);
  return true;
}

bool MailboxTake(Mailbox& box, std::string* message) {
  for (;;) {
    const uint64_t tail = box.tail.load(std::memory_order_relaxed);
    const uint64_t head = box.head.load(std::memory_order_acquire);
    if (head == tail) return false;
    uint32_t header = 0;
    RingCopyOut(box, tail, &header, sizeof header);
    const uint32_t size = header & ~kMorePieces;
    const size_t before = message->size();
    message->resize(before + size);
    RingCopyOut(box, tail + sizeof header, message->data() + before, size);
    box.tail.store(tail + sizeof header + size, std::memory_order_release);
    if ((header & kMorePieces) == 0) return true;
  }
}

ControlChannel::ControlChannel(const ddl_transport& transport, GroupMemory& memory, const ControlTree& tree)
    : transport_(transport),
      memory_(memory),
      local_of_(static_cast<size_t>(transport.size), -1),
      parent_(tree.parent()),
      arriving_(static_cast<size_t>(memory.local_size())),
      sends_(transport),
      receives_(transport),
      aborts_(transport) {
  for (int local = 0; local < memory.local_size(); ++local) {
    local_of_[static_cast<size_t>(memory.members()[static_cast<size_t>(local)])] = local;
  }
  const auto& children = tree.children();
  from_below_ = std::any_of(children.begin(), children.end(), [&](const auto& child) { return !IsLocal(child.rank); });
  from_above_ = transport.rank != 0 && !IsLocal(0);
  mailboxes_ = leads() ? std::any_of(children.begin(), children.end(), [&](const auto& c) { return IsLocal(c.rank); })
                       : IsLocal(parent_);
  polls_ = from_below_ || (from_above_ && !HasMailbox(parent_));
}

bool ControlChannel::TryPost(int peer, const MailboxPiece& piece) {
  const int local = local_of_[static_cast<size_t>(peer)];
  Mailbox& box = leads() ? memory_.block(local).from_leader : memory_.own().to_leader;
  if (!MailboxPut(box, piece)) return false;
  RingBell(memory_.block(local));
  return true;
}

void ControlChannel::Send(int peer, std::string bytes) {
  sent_.Add(bytes.size());
  if (HasMailbox(peer)) {
    auto& queue = queued_[peer];
    size_t at = 0;
    for (; bytes.size() - at > kPieceBytes; at += kPieceBytes) queue.push_back({bytes.substr(at, kPieceBytes), true});
    MailboxPiece last{at == 0 ? std::move(bytes) : bytes.substr(at), false};
    if (!queue.empty() || !TryPost(peer, last)) queue.push_back(std::move(last));
    return;
  }
  const Status status = sends_.Send(peer, peer == 0 || peer == parent_ ? kUpTag : kDownTag, bytes);
  if (!status.ok()) send_error_ = status;
}

void ControlChannel::SendAbort(const std::string& bytes) {
  for (int peer = 0; peer < transport_.size; ++peer) {
    // Best effort: the peer may be the process that died.
    if (!IsLocal(peer)) (void)sends_.Send(peer, kAbortTag, bytes);
  }
}

bool ControlChannel::Flush() {
  for (auto at = queued_.begin(); at != queued_.end();) {
    auto& [peer, queue] = *at;
    while (!queue.empty() && TryPost(peer, queue.front())) queue.pop_front();
    at = queue.empty() ? queued_.erase(at) : std::next(at);
  }
  return queued_.empty();
}

Status ControlChannel::Poll(std::vector<Received>* received) {
  const size_t before = received->size();
  const Status status = PollAll(received);
  for (size_t i = before; i < received->size(); ++i) received_.Add((*received)[i].bytes.size());
  return status;
}

Status ControlChannel::PollAll(std::vector<Received>* received) {
  if (!send_error_.ok()) return send_error_;
  Flush();
  const auto take = [&](int from, Mailbox& box, std::string& arriving) {
    while (MailboxTake(box, &arriving)) received->push_back({from, std::exchange(arriving, {})});
  };
  if (mailboxes_ && leads()) {
    for (int local = 0; local < memory_.local_size(); ++local) {
      const auto at = static_cast<size_t>(local);
      take(memory_.members()[at], memory_.block(local).to_leader, arriving_[at]);
    }
  } else if (mailboxes_) {
    take(parent_, memory_.own().from_leader, arriving_[0]);
  }
  if (!sends_.empty()) DDL_RETURN_IF_ERROR(sends_.TakeFinished(received));
  if (from_below_) DDL_RETURN_IF_ERROR(receives_.ReceiveArriving(kUpTag));
  if (from_above_) DDL_RETURN_IF_ERROR(receives_.ReceiveArriving(kDownTag));
  if (!receives_.empty()) DDL_RETURN_IF_ERROR(receives_.TakeFinished(received));
  return PollAborts(received);
}

Status ControlChannel::PollAborts(std::vector<Received>* received) {
  if (memory_.local_size() == transport_.size) return {};  // in one group of all ranks, shared memory shows every death
  DDL_RETURN_IF_ERROR(aborts_.ReceiveArriving(kAbortTag));
  return aborts_.TakeFinished(received);
}

void ControlChannel::Cancel() {
  const double give_up = Now() + OwnedMessages::kCancelSeconds;
  for (OwnedMessages* messages : {&sends_, &receives_, &aborts_}) messages->Cancel(give_up);
}

}  // namespace ddl
