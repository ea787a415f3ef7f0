// How an engine detects failures, gives up the communicator, and leaves.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "engine/engine.h"
#include "shm/doorbell.h"

namespace ddl {
namespace {

// How long a leaving rank waits for its last messages to be sent.
constexpr double kLeaveSeconds = 1.0;
// How long a running collective has to finish when the process shuts down.
constexpr double kStopGraceSeconds = 2.0;
// How often a collective on a calling thread checks for an interrupt, and how long it then has to finish: one that
// makes progress ends within this time, and is not broken by a Ctrl-C.
constexpr double kInterruptCheckSeconds = 0.1;
constexpr double kInterruptGraceSeconds = 1.0;
// How often a leaving rank checks whether a calling thread has finished.
constexpr unsigned kInlinePollUs = 100;

Status LeftDuringCollective(int rank) {
  return {DDL_UNAVAILABLE,
          "rank " + std::to_string(rank) + " has left during a collective (its process ended or called shutdown)"};
}

}  // namespace

void Engine::CheckPeers() {
  if (!broken_.ok()) {
    // When rank 0 leaves, a calling thread may be in a collective with the others: keep checking on it.
    const Status health = IsInlineBusy() ? Health() : Status();
    if (!health.ok()) PublishBroken(health);
    return;
  }
  if (coordinator_ != nullptr) coordinator_->Tick(Now());
  ExchangePositions();
  const Status health = Health();
  if (!health.ok()) {
    Break(health);
    return;
  }
  if (lane_ != nullptr) CheckLane();
  if (deadline_s_ <= 0) return;
  // The coordinator answers before its deadline; silence well beyond it means that rank 0 is gone or unreachable.
  const double limit = deadline_s_ * 1.25 + 5;
  for (const auto& [name, queue] : pending_) {
    if (name == kJoin || Now() - queue.front()->announced < limit) continue;
    Break({DDL_DEADLINE_EXCEEDED,
           "'" + name + "' has waited " + std::to_string(static_cast<int>(limit)) + " s and " + locations_.Describe(0) +
               ", which coordinates, does not answer: its process is stopped or its host is unreachable."});
    return;
  }
}

void Engine::ExchangePositions() {
  if (coordinator_ != nullptr) {
    for (int rank : coordinator_->TakePositionQueries()) {
      if (rank == transport_.rank) {
        ReportPosition();
      } else if (!locations_.ProcessProblem(rank).empty()) {
        coordinator_->OnPositionReport(rank, "", true);  // a stopped process has nothing to say
      } else {
        channel_.Send(rank, EncodeText(MessageType::kPositionQuery, ""));
      }
    }
  }
  std::string reply;
  if (!stack_position_.TakeReply(&reply)) return;
  Position position = Position::Decode(reply);
  position.pending = num_pending_;
  // What it has submitted may yet move there.
  Engine* const lane = planned_engine_.load(std::memory_order_acquire);
  if (lane != nullptr && lane->HasOutstanding()) position.idle_s = 0;
  SendToCoordinator(MessageType::kPosition, position.Encode());
}

bool Engine::HasOutstanding() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !stop_ && OwnBlock(*memory_).outstanding.load(std::memory_order_acquire) != 0;
}

void Engine::ReportPosition() {
  SendToCoordinator(stack_position_.Query() ? MessageType::kPositionPending : MessageType::kPosition, "");
}

void Engine::SendToCoordinator(MessageType type, const std::string& text) {
  if (coordinator_ != nullptr) {
    coordinator_->OnPositionReport(transport_.rank, text, type == MessageType::kPosition);
  } else {
    channel_.Send(0, EncodeText(type, text));
  }
}

void Engine::OnPositionKnown() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stop_) RingBell(memory_->own());
}

// During a collective messages stay unread, and a kLeave may be among them: they are read now and handled later.
bool Engine::HasLeft(int rank) {
  if (coordinator_ != nullptr && coordinator_->HasLeft(rank)) return true;
  if (rank == 0 && coordinator_left_) return true;
  if (!channel_.Poll(&deferred_messages_).ok()) return false;
  return std::any_of(deferred_messages_.begin(), deferred_messages_.end(),
                     [rank](const ControlChannel::Received& message) {
                       return message.peer == rank && TypeOf(message.bytes) == MessageType::kLeave;
                     });
}

bool Engine::WarnsForGroup(double seconds) {
  const auto now_ms = static_cast<int64_t>(Now() * 1e3);
  RankBlock& own = memory_->own();
  for (int local = 0; local < memory_->local_size(); ++local) {
    const int64_t told = memory_->block(local).warned_ms.load(std::memory_order_relaxed);
    if (local != memory_->local_rank() && told != 0 && now_ms - told < 1e3 * seconds / 2) return false;
  }
  own.warned_ms.store(now_ms, std::memory_order_relaxed);
  return true;
}

double Engine::WarnStalled(const std::string& waits_for, double seconds) {
  const double again = 2 * seconds;
  if (!WarnsForGroup(seconds)) return again;
  const bool inline_path = !OnCommunicationThread();
  Warn((inline_path ? "'" + std::string(running_inline_->name) + "'" : Label(*running_)) +
       " is running, but has made no progress for " + std::to_string(static_cast<int>(seconds)) +
       " s: " + locations_.Describe(transport_.rank) + " waits for " + waits_for + "." + DescribeSuspects() +
       (deadline_s_ > 0 ? " It fails after " + std::to_string(static_cast<int>(deadline_s_)) + " s." : ""));
  return again;
}

std::string Engine::DescribeSuspects() const {
  std::string text;
  const double now = Now();
  for (int rank = 0; rank < transport_.size; ++rank) {
    const auto& members = memory_->members();
    const auto at = std::find(members.begin(), members.end(), rank);
    std::string problem = locations_.ProcessProblem(rank);
    if (problem.empty() && at != members.end() && rank != transport_.rank &&
        !ShowsRecentActivity(memory_->block(static_cast<int>(at - members.begin())), now)) {
      problem = "shows no sign of life: it is stopped or overloaded";
    }
    if (problem.empty()) continue;
    std::string sentence = locations_.Describe(rank);
    sentence[0] = 'R';
    text += " " + sentence + " " + problem + ".";
  }
  return text + heartbeat_.DescribeSilence(now);
}

Status Engine::WithSuspects(const Status& status) const {
  if (status.code() != DDL_DEADLINE_EXCEEDED) return status;
  return {status.code(), status.message() + DescribeSuspects()};
}

Status Engine::Health() {
  // The communication thread, idle meanwhile, checks on the others many times a second and records that in the block.
  if (!OnCommunicationThread()) return HealthInline();
  const double now = Now();
  memory_->own().alive_ms.store(static_cast<int64_t>(now * 1e3), std::memory_order_relaxed);
  DDL_RETURN_IF_ERROR(peer_watch_.Check());
  DDL_RETURN_IF_ERROR(heartbeat_.Beat(now));
  std::vector<ControlChannel::Received> aborts;
  DDL_RETURN_IF_ERROR(channel_.PollAborts(&aborts));
  for (const auto* messages : {&aborts, &deferred_messages_}) {
    for (const auto& message : *messages) {
      if (TypeOf(message.bytes) == MessageType::kAbort) return DecodeReason(DecodeText(message.bytes));
    }
  }
  if (stop_ && Now() - stop_since_ > kStopGraceSeconds) {
    return LeftDuringCollective(transport_.rank);
  }
  return {};
}

Status Engine::HealthInline() {
  const RankBlock& own = memory_->own();
  if (own.state.load(std::memory_order_acquire) == kBroken) return DecodeReason(own.reason);
  // Close waits for this thread.
  if (stop_ && Now() - stop_since_ > kStopGraceSeconds) {
    return LeftDuringCollective(transport_.rank);
  }
  return CheckInterrupted();
}

Status Engine::CheckInterrupted() {
  if (running_inline_->interrupted == nullptr) return {};
  const double now = Now();
  if (interrupted_since_ > 0) {
    if (now - interrupted_since_ < kInterruptGraceSeconds) return {};
    return {DDL_ABORTED, locations_.Describe(transport_.rank) + " was interrupted (Ctrl-C or another signal) during '" +
                             running_inline_->name + "', which made no progress"};
  }
  if (interrupt_checked_at_ == 0) interrupt_checked_at_ = now;
  if (now - interrupt_checked_at_ < kInterruptCheckSeconds) return {};
  if (running_inline_->interrupted(running_inline_->user) != 0) interrupted_since_ = now;
  interrupt_checked_at_ = Now();  // the call may take long
  return {};
}

void Engine::Break(const Status& status) {
  if (!broken_.ok()) return;
  broken_ = status;
  PublishBroken(status);
  channel_.SendAbort(EncodeText(MessageType::kAbort, EncodeReason(status)));
  FailPending(status);
}

void Engine::PublishBroken(const Status& status) {
  RankBlock& own = memory_->own();
  const std::string reason = Truncate(EncodeReason(status), sizeof own.reason - 1);
  std::memcpy(own.reason, reason.c_str(), reason.size() + 1);
  own.state.store(kBroken, std::memory_order_release);
  for (int local = 0; local < memory_->local_size(); ++local) {
    if (local != memory_->local_rank()) RingBell(memory_->block(local));
  }
}

bool Engine::IsInlineBusy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return inline_busy_;
}

void Engine::FailPending(const Status& status) {
  auto pending = std::exchange(pending_, {});
  usable_ = false;
  num_pending_ = 0;
  executor_.EndJoin();
  decisions_.clear();
  if (lane_ != nullptr) {
    TakeSubmissions();  // what came during the collective that failed must not wait for another deadline elsewhere
    for (auto& request : lane_->runs().TakeAll()) Finish(*request, WithPendingRequest(status, request->announcement));
  }
  for (auto& [name, queue] : pending) {
    for (auto& request : queue) {
      Finish(*request, WithPendingRequest(status, request->announcement));
    }
  }
}

Status Engine::WithPendingRequest(const Status& status, const Announcement& announcement) {
  return {status.code(), status.message() + " (pending: " + Label(announcement) + ")"};
}

void Engine::Leave() {
  // The other ranks need a calling thread that is in a collective. After a while it gives up by itself.
  while (IsInlineBusy()) {
    const Status health = Health();
    if (!health.ok()) Break(health);
    usleep(kInlinePollUs);
  }
  std::vector<std::unique_ptr<Request>> late;
  Status failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    late.swap(submitted_);
    std::swap(failure, inline_failure_);
  }
  if (!failure.ok()) Break(failure);
  const Status closed(DDL_FAILED_PRECONDITION, "the communicator has been shut down");
  for (auto& request : late) {
    if (request->done != nullptr) Finish(*request, closed);
  }
  std::string abandoned = pending_.empty() ? "" : Label(pending_.begin()->second.front()->announcement);
  if (broken_.ok() && lane_ != nullptr && lane_->posted() != nullptr) abandoned = Label(lane_->posted()->announcement);
  FailPending(closed);
  // The others may already be running what this rank has announced, and would wait for it.
  if (!abandoned.empty()) {
    Break({DDL_UNAVAILABLE, "rank " + std::to_string(transport_.rank) + " has left while " + abandoned +
                                " was pending there (its process ended or called shutdown)"});
  }
  if (broken_.ok()) {
    if (coordinator_ != nullptr) {
      for (; !outbox_.empty(); outbox_.pop_front(), outbox_front_sent_ = false) SendVerdict();
      const std::string text = EncodeText(
          MessageType::kLeave, "rank 0 has left (its process ended or called shutdown); no collective can follow");
      for (int rank = 1; rank < transport_.size; ++rank) {
        if (!coordinator_->HasLeft(rank)) channel_.Send(rank, text);
      }
    } else {
      channel_.Send(0, EncodeText(MessageType::kLeave, ""));
    }
    memory_->own().state.store(kLeft, std::memory_order_release);
  }
  std::vector<ControlChannel::Received> ignored;
  const double start = Now();
  while (!channel_.Idle() && Now() - start < kLeaveSeconds && channel_.Poll(&ignored).ok()) sched_yield();
  channel_.Cancel();
  heartbeat_.Cancel();
  if (lane_ != nullptr) lane_->Cancel();
}

}  // namespace ddl
