#include "engine/coordinated_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/trace.h"
#include "base/waiter.h"
#include "engine/engine_block.h"

namespace ddl {

CoordinatedQueue::CoordinatedQueue(Endpoint& endpoint) : Queue(endpoint) {
  if (endpoint.rank() != 0) return;
  coordinator_ = std::make_unique<Coordinator>(endpoint.locations(), endpoint.warn_after_s(), endpoint.deadline_s());
}

void CoordinatedQueue::Add(std::unique_ptr<Request> request) {
  if (!endpoint_.broken().ok()) {
    Finish(*request, WithPendingRequest(endpoint_.broken(), request->announcement));
    return;
  }
  const bool joins = request->announcement.kind == DDL_JOIN;
  if (HasJoined() && !joins) {
    Finish(*request, {DDL_FAILED_PRECONDITION,
                      Label(request->announcement) + " was submitted by rank " + std::to_string(endpoint_.rank()) +
                          ", which has joined: it takes part in the collectives of the others, and submits none until "
                          "all ranks have joined.",
                      {{endpoint_.rank(), DDL_RANK_NAMED}}});
    return;
  }
  // A second join, for example after a Ctrl-C in the first, waits with the join that was already announced.
  if (!HasJoined()) Announce(request->announcement);
  request->announced = Now();
  pending_[request->announcement.name].push_back(std::move(request));
  ++num_pending_;
}

void CoordinatedQueue::Announce(const Announcement& announcement) {
  if (coordinator_ != nullptr) {
    coordinator_->Announce(0, announcement, Now());
    return;
  }
  const uint32_t id = known_.IdOf(announcement);
  endpoint_.channel().Send(0, id != 0 ? EncodeKnown(id, announcement.step) : EncodeAnnouncement(announcement));
}

void CoordinatedQueue::Handle(int peer, const std::string& bytes) {
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
      endpoint_.MarkLeft(peer);
      if (coordinator_ != nullptr) {
        coordinator_->Leave(peer);
        break;
      }
      // Rank 0's decisions came before this message, and are finished first: see FailWithoutCoordinator.
      coordinator_left_ = true;
      leave_reason_ = DecodeText(bytes);
      break;
    case MessageType::kDecide:
    case MessageType::kDecideKnown:
      Decided(DecodeDecision(bytes));
      break;
    case MessageType::kPositionQuery:
      ReportPosition();
      break;
    case MessageType::kPositionPending:
    case MessageType::kPosition:
      coordinator_->OnPositionReport(peer, DecodeText(bytes), TypeOf(bytes) == MessageType::kPosition);
      break;
    case MessageType::kAbort:  // handled by the endpoint
      break;
  }
}

bool CoordinatedQueue::Progress() {
  bool worked = DeliverVerdicts();
  worked = RunDecisions() || worked;
  FailWithoutCoordinator();
  return worked;
}

bool CoordinatedQueue::DeliverVerdicts() {
  if (coordinator_ == nullptr) return false;
  for (Verdict& verdict : coordinator_->TakeVerdicts()) outbox_.push_back(std::move(verdict));
  // Stored before verdicts are sent, so that a rank that knows of a failure cannot meet one that does not at a
  // rendezvous.
  const bool all_come_here = coordinator_->HasTombstones(Now()) || coordinator_->AnyJoined();
  OwnBlock(endpoint_.memory()).no_rendezvous.store(all_come_here ? 1 : 0, std::memory_order_relaxed);
  bool any = false;
  while (!outbox_.empty()) {
    SendVerdict();
    // This rank starts a collective only when no message about it waits for room in a mailbox. Nobody empties mailboxes
    // during a collective, so this rank would wait for a rank that does not know about the collective.
    if (!endpoint_.channel().Flush()) break;
    const Verdict& verdict = outbox_.front();
    if (std::find(verdict.ranks.begin(), verdict.ranks.end(), 0) != verdict.ranks.end()) Decided(verdict.decision);
    outbox_.pop_front();
    outbox_front_sent_ = false;
    any = true;
  }
  for (const std::string& warning : coordinator_->TakeWarnings()) endpoint_.Warn(warning);
  return any;
}

void CoordinatedQueue::SendVerdict() {
  if (std::exchange(outbox_front_sent_, true)) return;
  const Verdict& verdict = outbox_.front();
  std::string bytes;
  for (const int rank : verdict.ranks) {
    if (rank == 0 || endpoint_.left(rank)) continue;
    if (bytes.empty()) bytes = EncodeDecision(verdict.decision);
    endpoint_.channel().Send(rank, bytes);
  }
}

void CoordinatedQueue::SendLast() {
  for (; !outbox_.empty(); outbox_.pop_front(), outbox_front_sent_ = false) SendVerdict();
}

void CoordinatedQueue::Decided(Decision decision) {
  decisions_.push_back(std::move(decision));
  decisions_.back().agreed = Trace::Stamp();
}

bool CoordinatedQueue::RunDecisions() {
  const bool any = !decisions_.empty();
  while (!decisions_.empty()) {
    const Decision decision = std::move(decisions_.front());
    decisions_.pop_front();
    RunDecision(decision);
  }
  return any;
}

void CoordinatedQueue::RunDecision(const Decision& decision) {
  if (decision.id == 0 && decision.name == kJoin) {
    EndJoin(decision);
    return;
  }
  if (std::find(decision.joined.begin(), decision.joined.end(), endpoint_.rank()) != decision.joined.end()) {
    // Not if an abort has overtaken the decision. If only the request fails, the ranks that submitted it report that.
    if (endpoint_.broken().ok()) (void)endpoint_.RunJoined(decision);
    return;
  }
  const bool by_id = coordinator_ == nullptr && decision.id != 0 && !decision.gives_id;
  const auto at = pending_.find(by_id ? known_.At(decision.id)->name : decision.name);
  // An abort that overtook the decision may have failed all pending requests.
  if (at == pending_.end()) return;
  const std::unique_ptr<Request> request = std::move(at->second.front());
  at->second.pop_front();
  if (at->second.empty()) pending_.erase(at);
  --num_pending_;
  if (coordinator_ == nullptr && decision.gives_id) known_.Add(request->announcement);
  num_decided_.fetch_add(1, std::memory_order_relaxed);
  PlannedQueue* const planned = planned_.load(std::memory_order_acquire);
  if (planned != nullptr && (request->announcement.flags & DDL_FLAG_RESUMES) != 0) planned->Resume();
  const double started = Trace::Stamp();
  Status status = decision.status();
  if (status.ok()) status = endpoint_.Run(*request, decision);
  if (started > 0) request->TraceRun(decision.agreed, started, status.code());
  Finish(*request, status);
}

void CoordinatedQueue::EndJoin(const Decision& decision) {
  const auto at = pending_.find(kJoin);
  if (at == pending_.end()) return;  // failed by an abort that overtook the decision
  const auto joins = std::move(at->second);
  pending_.erase(at);
  num_pending_ -= joins.size();
  endpoint_.executor().EndJoin();
  const Status status = decision.status();
  const double now = Trace::Stamp();
  for (const auto& join : joins) {
    if (status.ok()) std::memcpy(join->buffers[0].out, &decision.last_joined, sizeof decision.last_joined);
    if (now > 0) join->TraceRun(decision.agreed, now, status.code());
    Finish(*join, status);
  }
}

void CoordinatedQueue::FailWithoutCoordinator() {
  if (!coordinator_left_ || !endpoint_.broken().ok()) return;
  endpoint_.SetBroken({DDL_UNAVAILABLE, leave_reason_, {{0, DDL_RANK_LEFT}}});
  Fail(endpoint_.broken());
}

void CoordinatedQueue::Fail(const Status& status) {
  const auto pending = std::exchange(pending_, {});
  submissions_.Refuse();
  num_pending_ = 0;
  endpoint_.executor().EndJoin();
  decisions_.clear();
  for (const auto& [name, queue] : pending) {
    for (const auto& request : queue) Finish(*request, WithPendingRequest(status, request->announcement));
  }
}

std::string CoordinatedQueue::DescribePromised() const {
  return pending_.empty() ? "" : Label(pending_.begin()->second.front()->announcement);
}

void CoordinatedQueue::CheckDeadlines() {
  if (coordinator_ != nullptr) coordinator_->Tick(Now());
  ExchangePositions();
  if (endpoint_.deadline_s() <= 0) return;
  // The coordinator answers before its deadline; silence well beyond it means that rank 0 is gone or unreachable.
  const double limit = endpoint_.deadline_s() * 1.25 + 5;
  for (const auto& [name, queue] : pending_) {
    if (name == kJoin || Now() - queue.front()->announced < limit) continue;
    endpoint_.Break({DDL_DEADLINE_EXCEEDED,
                     "'" + name + "' has waited " + std::to_string(static_cast<int>(limit)) + " s and " +
                         endpoint_.locations().Describe(0) +
                         ", which coordinates, does not answer: its process is stopped or its host is unreachable.",
                     {{0, DDL_RANK_SILENT}}});
    return;
  }
}

void CoordinatedQueue::ExchangePositions() {
  if (coordinator_ != nullptr) {
    for (const int rank : coordinator_->TakePositionQueries()) {
      if (rank == endpoint_.rank()) {
        ReportPosition();
      } else if (!endpoint_.locations().ProcessProblem(rank).empty()) {
        coordinator_->OnPositionReport(rank, "", true);  // a stopped process does not reply
      } else {
        endpoint_.channel().Send(rank, EncodeText(MessageType::kPositionQuery, ""));
      }
    }
  }
  std::string reply;
  if (!stack_position_.TakeReply(&reply)) return;
  Position position = Position::Decode(reply);
  position.pending = num_pending_;
  // Requests in the planned queue may still fall back to this queue.
  PlannedQueue* const planned = planned_.load(std::memory_order_acquire);
  if (planned != nullptr && planned->HasOutstanding()) position.idle_s = 0;
  SendPosition(MessageType::kPosition, position.Encode());
}

void CoordinatedQueue::ReportPosition() {
  SendPosition(stack_position_.Query() ? MessageType::kPositionPending : MessageType::kPosition, "");
}

void CoordinatedQueue::SendPosition(MessageType type, const std::string& text) {
  if (coordinator_ != nullptr) {
    coordinator_->OnPositionReport(endpoint_.rank(), text, type == MessageType::kPosition);
  } else {
    endpoint_.channel().Send(0, EncodeText(type, text));
  }
}

int64_t CoordinatedQueue::SleepUs(double idle_s) const {
  const ControlChannel& channel = endpoint_.channel();
  if (num_pending_ == 0 && channel.Idle() && channel.NothingArriving()) return 100'000;
  // Neither messages from other hosts nor a mailbox that has room again ring the bell.
  return channel.NeedsPolling() || !channel.Idle() ? PollUs(idle_s) : 20'000;
}

}  // namespace ddl
