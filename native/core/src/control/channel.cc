#include "control/channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/tags.h"
#include "base/waiter.h"
#include "shm/doorbell.h"

namespace ddl {
namespace {

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

bool MailboxPut(Mailbox& box, const std::string& bytes) {
  const auto size = static_cast<uint32_t>(bytes.size());
  const uint64_t head = box.head.load(std::memory_order_relaxed);
  const uint64_t tail = box.tail.load(std::memory_order_acquire);
  if (kMailboxBytes - (head - tail) < size + sizeof size) return false;
  RingCopyIn(box, head, &size, sizeof size);
  RingCopyIn(box, head + sizeof size, bytes.data(), size);
  box.head.store(head + sizeof size + size, std::memory_order_release);
  return true;
}

bool MailboxTake(Mailbox& box, std::string* bytes) {
  const uint64_t tail = box.tail.load(std::memory_order_relaxed);
  const uint64_t head = box.head.load(std::memory_order_acquire);
  if (head == tail) return false;
  uint32_t size = 0;
  RingCopyOut(box, tail, &size, sizeof size);
  bytes->resize(size);
  RingCopyOut(box, tail + sizeof size, bytes->data(), size);
  box.tail.store(tail + sizeof size + size, std::memory_order_release);
  return true;
}

ControlChannel::ControlChannel(const ddl_transport& transport, GroupMemory& memory)
    : transport_(transport),
      memory_(memory),
      local_of_(static_cast<size_t>(transport.size), -1),
      sends_(transport),
      receives_(transport),
      aborts_(transport) {
  for (int local = 0; local < memory.local_size(); ++local) {
    local_of_[static_cast<size_t>(memory.members()[static_cast<size_t>(local)])] = local;
  }
  remote_ = transport.rank == 0 ? memory.local_size() < transport.size : !IsLocal(0);
}

bool ControlChannel::TryPost(int peer, const std::string& bytes) {
  const int local = local_of_[static_cast<size_t>(peer)];
  Mailbox& box = transport_.rank == 0 ? memory_.block(local).from_coordinator : memory_.own().to_coordinator;
  if (!MailboxPut(box, bytes)) return false;
  RingBell(memory_.block(local));
  return true;
}

void ControlChannel::Send(int peer, std::string bytes) {
  if (IsLocal(peer)) {
    auto& queue = queued_[peer];
    if (!queue.empty() || !TryPost(peer, bytes)) queue.push_back(std::move(bytes));
    return;
  }
  const Status status = sends_.Send(peer, transport_.rank == 0 ? kDownTag : kUpTag, bytes);
  if (!status.ok()) send_error_ = status;
}

void ControlChannel::SendAbort(const std::string& bytes) {
  for (int peer = 0; peer < transport_.size; ++peer) {
    // Best effort: the peer may be the very process that died.
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
  if (!send_error_.ok()) return send_error_;
  Flush();
  std::string bytes;
  if (transport_.rank == 0) {
    for (int local = 0; local < memory_.local_size(); ++local) {
      while (MailboxTake(memory_.block(local).to_coordinator, &bytes)) {
        received->push_back({memory_.members()[static_cast<size_t>(local)], std::move(bytes)});
      }
    }
  } else {
    while (MailboxTake(memory_.own().from_coordinator, &bytes)) received->push_back({0, std::move(bytes)});
  }
  if (!sends_.empty()) DDL_RETURN_IF_ERROR(sends_.TakeFinished(received));
  if (remote_) {
    DDL_RETURN_IF_ERROR(receives_.ReceiveArriving(transport_.rank == 0 ? kUpTag : kDownTag));
    DDL_RETURN_IF_ERROR(receives_.TakeFinished(received));
  }
  return PollAborts(received);
}

Status ControlChannel::PollAborts(std::vector<Received>* received) {
  if (memory_.local_size() == transport_.size) return {};  // a group of everyone shows deaths to everyone
  DDL_RETURN_IF_ERROR(aborts_.ReceiveArriving(kAbortTag));
  return aborts_.TakeFinished(received);
}

void ControlChannel::Cancel() {
  const double give_up = Now() + OwnedMessages::kCancelSeconds;
  for (OwnedMessages* messages : {&sends_, &receives_, &aborts_}) messages->Cancel(give_up);
}

}  // namespace ddl
