// The messages between an engine and the coordinator, or those on the way to it: announcements one way, decisions the
// other.
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
  if (cut_off_by_ >= 0) {
    Finish(*request, CutOffStatus(request->announcement));
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
    SendAnnouncement(request->announcement);
  }
  request->announced = Now();
  auto& queue = pending_[request->announcement.name];
  queue.push_back(std::move(request));
  ++num_pending_;
}

void Engine::SendAnnouncement(const Announcement& a) {
  const uint32_t id = known_.IdOf(a);
  if (relay_ != nullptr) {
    relay_->Add({{transport_.rank}, {a.step}, {a.rows}, id, a}, Now());
    SendRelayed();
  } else {
    channel_.Send(tree_.parent(), id != 0 ? EncodeKnown(id, a.step) : EncodeAnnouncement(a));
  }
}

bool Engine::TakeMessages() {
  std::vector<ControlChannel::Received> received = std::exchange(deferred_messages_, {});
  const Status status = channel_.Poll(&received);
  if (!status.ok()) Break(status);
  for (const auto& message : received) Handle(message.peer, message.bytes);
  SendRelayed();
  return !received.empty();
}

void Engine::Handle(int peer, const std::string& bytes) {
  switch (TypeOf(bytes)) {
    case MessageType::kAnnounce:
    case MessageType::kAnnounceKnown:
    case MessageType::kAnnounceAlike:
      HandleAnnouncement(peer, bytes);
      break;
    case MessageType::kUndecided:
      coordinator_->OnUndecided(peer, DecodeUndecided(bytes), Now());
      break;
    case MessageType::kLeave: {
      uint64_t decisions = 0;
      const std::string text = DecodeLeave(bytes, &decisions);
      if (coordinator_ != nullptr) coordinator_->Leave(peer);
      if (lane_ != nullptr) CloseLane(text);
      if (coordinator_ != nullptr || lane_ != nullptr) break;
      if (peer != 0) {
        gone_.insert(peer);
        break;
      }
      coordinator_left_ = true;
      decisions_before_ = decisions;
      farewell_ = text;
      break;
    }
    case MessageType::kCutOff:
      CutOff(DecodeCutOff(bytes));
      break;
    case MessageType::kForward: {
      std::string message;
      const std::vector<int> ranks = DecodeForward(bytes, &message);
      HandleDecision(ranks.empty() ? tree_.ranks() : ranks, message);
      break;
    }
    case MessageType::kDecide:
    case MessageType::kDecideKnown:
      HandleDecision({transport_.rank}, bytes);
      // Past those on the way, which the coordinator misses: it does so until it knows that nothing is left on the way.
      if (peer == 0 && tree_.parent() != 0) SendUndecided();
      break;
    case MessageType::kPositionQuery:
      if (tree_.parent() != 0) SendUndecided();
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

void Engine::HandleAnnouncement(int peer, const std::string& bytes) {
  if (cut_off_by_ >= 0) return;  // those behind this rank have been told
  AlikeAnnouncements alike;
  switch (TypeOf(bytes)) {
    case MessageType::kAnnounce:
      alike.announcement = DecodeAnnouncement(bytes);
      if (coordinator_ != nullptr) {
        coordinator_->Announce(peer, std::move(alike.announcement), Now());
        return;
      }
      alike.ranks = {peer};
      alike.steps = {alike.announcement.step};
      alike.rows = {alike.announcement.rows};
      break;
    case MessageType::kAnnounceKnown: {
      uint64_t step = 0;
      alike.id = DecodeKnown(bytes, &step);
      if (coordinator_ != nullptr) {
        coordinator_->AnnounceKnown(peer, alike.id, step, Now());
        return;
      }
      alike.ranks = {peer};
      alike.steps = {step};
      break;
    }
    default:
      alike = DecodeAlike(bytes);
  }
  if (coordinator_ != nullptr) {
    coordinator_->AnnounceAlike(std::move(alike), Now());
  } else {
    relay_->Add(std::move(alike), Now());
  }
}

void Engine::HandleDecision(const std::vector<int>& ranks, const std::string& bytes) {
  Outgoing outgoing;
  Decision decision = DecodeDecision(bytes);
  if (relay_ != nullptr) {
    relay_->OnDecision(decision);
    outgoing.messages = Route(tree_, ranks, bytes);
  }
  if (std::find(ranks.begin(), ranks.end(), transport_.rank) != ranks.end()) {
    ++num_decisions_;
    outgoing.own = std::move(decision);
  }
  outbox_.push_back(std::move(outgoing));
  Deliver();
}

bool Engine::DeliverVerdicts() {
  if (coordinator_ == nullptr) return Deliver();
  for (const Verdict& verdict : coordinator_->TakeVerdicts()) {
    Outgoing outgoing;
    const std::string bytes = EncodeDecision(verdict.decision);
    std::vector<int> ranks = verdict.ranks;
    if (coordinator_->AnyBypasses()) {
      const auto bypasses = [&](int rank) {
        if (!coordinator_->Bypasses(rank)) return false;
        outgoing.messages.push_back({rank, bytes});
        return true;
      };
      ranks.erase(std::remove_if(ranks.begin(), ranks.end(), bypasses), ranks.end());
    }
    for (Routed& routed : Route(tree_, ranks, bytes)) outgoing.messages.push_back(std::move(routed));
    if (std::find(ranks.begin(), ranks.end(), 0) != ranks.end()) outgoing.own = verdict.decision;
    outbox_.push_back(std::move(outgoing));
  }
  // Before the verdicts are sent: a rank that knows of a failure must not meet one at a rendezvous that does not.
  const bool all_come_here = coordinator_->HasTombstones(Now()) || coordinator_->AnyJoined();
  memory_->own().no_rendezvous.store(all_come_here ? 1 : 0, std::memory_order_relaxed);
  const bool any = Deliver();
  for (const std::string& warning : coordinator_->TakeWarnings()) Warn(warning);
  return any;
}

bool Engine::Deliver() {
  bool any = false;
  while (!outbox_.empty()) {
    Outgoing& outgoing = outbox_.front();
    if (!outbox_front_sent_) {
      for (Routed& routed : outgoing.messages) {
        const bool left = coordinator_ != nullptr ? coordinator_->HasLeft(routed.child) : gone_.count(routed.child) > 0;
        if (!left) channel_.Send(routed.child, std::move(routed.bytes));
      }
      outbox_front_sent_ = true;
    }
    // This rank starts a collective only when no message about it waits for room in a mailbox: nobody empties mailboxes
    // during a collective, and this rank would wait for a rank that does not know of it.
    if (!outgoing.messages.empty() && !channel_.Flush()) break;
    if (outgoing.own.has_value()) {
      decisions_.push_back(std::move(*outgoing.own));
      decisions_.back().agreed = Trace::Stamp();
    }
    outbox_.pop_front();
    outbox_front_sent_ = false;
    any = true;
  }
  return any;
}

}  // namespace ddl
