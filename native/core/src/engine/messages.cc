// The messages between an engine and the coordinator: announcements one way, decisions the other.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "base/trace.h"
#include "engine/engine.h"

namespace ddl {

void Engine::Announce(std::unique_ptr<Request> request) {
  if (lane_ != nullptr) {
    if (request->done == nullptr && request->place.size == 0) {
      lane_->Resume();
    } else if (request->done == nullptr) {
      lane_->runs().Skip(request->place, Now());
    } else {
      lane_->runs().Add(std::move(request), Now());
    }
    return;
  }
  if (!broken_.ok()) {
    Finish(*request, WithPendingRequest(broken_, request->announcement));
    return;
  }
  const bool joins = request->announcement.kind == DDL_JOIN;
  if (HasJoined() && !joins) {
    Finish(*request, {DDL_FAILED_PRECONDITION,
                      Label(request->announcement) + " was submitted by rank " + std::to_string(transport_.rank) +
                          ", which has joined: it takes part in the collectives of the others, and submits none until "
                          "all ranks have joined."});
    return;
  }
  if (HasJoined()) {
    // Waits with the join that the others already know of, as after a Ctrl-C in it.
  } else if (coordinator_ != nullptr) {
    coordinator_->Announce(0, request->announcement, Now());
  } else {
    const uint32_t id = known_.IdOf(request->announcement);
    channel_.Send(0, id != 0 ? EncodeKnown(id, request->announcement.step) : EncodeAnnouncement(request->announcement));
  }
  request->announced = Now();
  auto& queue = pending_[request->announcement.name];
  queue.push_back(std::move(request));
  ++num_pending_;
}

bool Engine::TakeMessages() {
  std::vector<ControlChannel::Received> received = std::exchange(deferred_messages_, {});
  const Status status = channel_.Poll(&received);
  if (!status.ok()) Break(status);
  for (const auto& message : received) Handle(message.peer, message.bytes);
  return !received.empty();
}

void Engine::Handle(int peer, const std::string& bytes) {
  switch (TypeOf(bytes)) {
    case MessageType::kAnnounce:
      coordinator_->Announce(peer, DecodeAnnouncement(bytes), Now());
      break;
    case MessageType::kAnnounceKnown: {
      uint64_t step = 0;
      const uint32_t id = DecodeKnown(bytes, &step);
      coordinator_->AnnounceKnown(peer, id, step, Now());
      break;
    }
    case MessageType::kLeave:
      if (coordinator_ != nullptr) coordinator_->Leave(peer);
      if (lane_ != nullptr) CloseLane(DecodeText(bytes));
      if (coordinator_ != nullptr || lane_ != nullptr) break;
      // What rank 0 decided came before this message, and is finished first: see FailWithoutCoordinator.
      coordinator_left_ = true;
      leave_reason_ = DecodeText(bytes);
      break;
    case MessageType::kDecide:
    case MessageType::kDecideKnown:
      decisions_.push_back(DecodeDecision(bytes));
      decisions_.back().agreed = Trace::Stamp();
      break;
    case MessageType::kPositionQuery:
      ReportPosition();
      break;
    case MessageType::kPositionPending:
    case MessageType::kPosition:
      coordinator_->OnPositionReport(peer, DecodeText(bytes), TypeOf(bytes) == MessageType::kPosition);
      break;
    case MessageType::kAbort:
      if (broken_.ok()) {
        broken_ = DecodeReason(DecodeText(bytes));
        FailPending(broken_);
      }
      break;
  }
}

bool Engine::DeliverVerdicts() {
  if (coordinator_ == nullptr) return false;
  for (Verdict& verdict : coordinator_->TakeVerdicts()) outbox_.push_back(std::move(verdict));
  // Before the verdicts are sent: a rank that knows of a failure must not meet one at a rendezvous that does not.
  const bool all_come_here = coordinator_->HasTombstones(Now()) || coordinator_->AnyJoined();
  OwnBlock(*memory_).no_rendezvous.store(all_come_here ? 1 : 0, std::memory_order_relaxed);
  bool any = false;
  while (!outbox_.empty()) {
    SendVerdict();
    const Verdict& verdict = outbox_.front();
    // This rank starts a collective only when no message about it waits for room in a mailbox: nobody empties mailboxes
    // during a collective, and this rank would wait for a rank that does not know of it.
    if (!channel_.Flush()) break;
    if (std::find(verdict.ranks.begin(), verdict.ranks.end(), 0) != verdict.ranks.end()) {
      decisions_.push_back(verdict.decision);
      decisions_.back().agreed = Trace::Stamp();
    }
    outbox_.pop_front();
    outbox_front_sent_ = false;
    any = true;
  }
  for (const std::string& warning : coordinator_->TakeWarnings()) Warn(warning);
  return any;
}

void Engine::SendVerdict() {
  if (std::exchange(outbox_front_sent_, true)) return;
  const Verdict& verdict = outbox_.front();
  std::string bytes;
  for (const int rank : verdict.ranks) {
    if (rank == 0 || coordinator_->HasLeft(rank)) continue;
    if (bytes.empty()) bytes = EncodeDecision(verdict.decision);
    channel_.Send(rank, bytes);
  }
}

void Engine::FailWithoutCoordinator() {
  if (!coordinator_left_ || !broken_.ok()) return;
  broken_ = {DDL_UNAVAILABLE, leave_reason_};
  FailPending(broken_);
}

}  // namespace ddl
