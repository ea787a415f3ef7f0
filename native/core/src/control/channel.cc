#include "control/channel.h"

#include <algorithm>
#include <utility>

#include "base/tags.h"
#include "base/waiter.h"
#include "shm/doorbell.h"

namespace ddl {
namespace {

// Longer messages are sent in pieces. Several pieces fit into a mailbox, so one is read while the next is written.
constexpr size_t kMailPieceBytes = kMailboxBytes / 4;

}  // namespace

ControlChannel::ControlChannel(const ddl_transport& transport, GroupMemory& memory)
    : transport_(transport),
      memory_(memory),
      local_of_(static_cast<size_t>(transport.size), -1),
      arriving_(static_cast<size_t>(memory.local_size())),
      sends_(transport),
      receives_(transport),
      aborts_(transport) {
  for (int local = 0; local < memory.local_size(); ++local) {
    local_of_[static_cast<size_t>(memory.members()[static_cast<size_t>(local)])] = local;
  }
  remote_ = transport.rank == 0 ? memory.local_size() < transport.size : !IsLocal(0);
}

bool ControlChannel::TryPost(int peer, const MailboxPiece& piece) {
  const int local = local_of_[static_cast<size_t>(peer)];
  Mailbox& box = transport_.rank == 0 ? MailboxesOf(memory_.block(local)).from_coordinator
                                      : MailboxesOf(memory_.own()).to_coordinator;
  if (!MailboxPut(box, piece)) return false;
  RingBell(memory_.block(local));
  return true;
}

void ControlChannel::Send(int peer, std::string bytes) {
  sent_.Add(bytes.size());
  if (IsLocal(peer)) {
    auto& queue = queued_[peer];
    size_t at = 0;
    for (; bytes.size() - at > kMailPieceBytes; at += kMailPieceBytes)
      queue.push_back({bytes.substr(at, kMailPieceBytes), true});
    MailboxPiece last{at == 0 ? std::move(bytes) : bytes.substr(at), false};
    if (!queue.empty() || !TryPost(peer, last)) queue.push_back(std::move(last));
    return;
  }
  const Status status = sends_.Send(peer, transport_.rank == 0 ? kDownTag : kUpTag, bytes);
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
  if (transport_.rank == 0) {
    for (int local = 0; local < memory_.local_size(); ++local) {
      const auto at = static_cast<size_t>(local);
      take(memory_.members()[at], MailboxesOf(memory_.block(local)).to_coordinator, arriving_[at]);
    }
  } else {
    take(0, MailboxesOf(memory_.own()).from_coordinator, arriving_[0]);
  }
  if (!sends_.empty()) DDL_RETURN_IF_ERROR(sends_.TakeFinished(received));
  if (remote_) {
    DDL_RETURN_IF_ERROR(receives_.ReceiveArriving(transport_.rank == 0 ? kUpTag : kDownTag));
    DDL_RETURN_IF_ERROR(receives_.TakeFinished(received));
  }
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
