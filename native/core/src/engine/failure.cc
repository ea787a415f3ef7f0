// How an engine notices that something is wrong, gives the communicator up, and leaves.
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
// A collective under way gets this long to finish when the process shuts down.
constexpr double kStopGraceSeconds = 2.0;
// How often a caller in the middle of a collective is asked whether it is interrupted, and how long it then still has
// to finish: a collective that goes on ends within this, and is not broken for a Ctrl-C.
constexpr double kAskCallerSeconds = 0.1;
constexpr double kInterruptGraceSeconds = 1.0;
// How often a leaving rank looks whether a calling thread has finished.
constexpr unsigned kInlineLookUs = 100;

Status ShutDownInside(int rank) {
  return {DDL_UNAVAILABLE, "rank " + std::to_string(rank) +
                               " has left in the middle of a collective (its process ended or called shutdown)"};
}

}  // namespace

void Engine::WatchOver() {
  if (!broken_.ok()) {
    // Rank 0's goodbye may find a calling thread in the middle of a collective with the others: watch over it still.
    const Status health = InlineBusy() ? Health() : Status();
    if (!health.ok()) ShowBroken(health);
    return;
  }
  if (coordinator_ != nullptr) coordinator_->Tick(Now());
  AskAndAnswer();
  const Status health = Health();
  if (!health.ok()) {
    Break(health);
    return;
  }
  if (deadline_s_ <= 0) return;
  // The coordinator answers before its deadline; silence well beyond it means that rank 0 is gone or unreachable.
  const double limit = deadline_s_ * 1.25 + 5;
  for (const auto& [name, queue] : pending_) {
    if (name == kJoin || Now() - queue.front()->submitted < limit) continue;
    Break({DDL_DEADLINE_EXCEEDED, "'" + name + "' has waited " + std::to_string(static_cast<int>(limit)) + " s and " +
                                      places_.Of(0) +
                                      ", which coordinates, does not answer: its process is stopped or its host "
                                      "unreachable."});
    return;
  }
}

void Engine::AskAndAnswer() {
  if (coordinator_ != nullptr) {
    for (int rank : coordinator_->TakeQuestions()) {
      if (rank == transport_.rank) {
        SayWhere();
      } else if (!places_.Trouble(rank).empty()) {
        coordinator_->Hear(rank, "", true);  // a stopped process has nothing to say
      } else {
        channel_.Send(rank, EncodeText(MessageType::kAsk, ""));
      }
    }
  }
  std::string answer;
  if (stack_position_.Take(&answer)) TellCoordinator(MessageType::kAnswer, answer.empty() ? "" : "is at " + answer);
}

void Engine::SayWhere() { TellCoordinator(stack_position_.Ask() ? MessageType::kHere : MessageType::kAnswer, ""); }

void Engine::TellCoordinator(MessageType type, const std::string& text) {
  if (coordinator_ != nullptr) {
    coordinator_->Hear(transport_.rank, text, type == MessageType::kAnswer);
  } else {
    channel_.Send(0, EncodeText(type, text));
  }
}

void Engine::Answered() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stop_) RingBell(memory_->own());
}

// In the middle of a collective messages wait unread, a goodbye among them: they are read now and handled later.
bool Engine::HasLeft(int rank) {
  if (coordinator_ != nullptr && coordinator_->HasLeft(rank)) return true;
  if (!channel_.Poll(&early_).ok()) return false;
  return std::any_of(early_.begin(), early_.end(), [rank](const ControlChannel::Received& message) {
    return message.peer == rank && TypeOf(message.bytes) == MessageType::kLeave;
  });
}

double Engine::WarnInside(const std::string& waits_for, double seconds) {
  // One rank of a group speaks for all that wait: usually the lowest, which is the first to look.
  const double again = 2 * seconds;
  const auto now_ms = static_cast<int64_t>(Now() * 1e3);
  RankBlock& own = memory_->own();
  for (int local = 0; local < memory_->local_size(); ++local) {
    const int64_t told = memory_->block(local).warned_ms.load(std::memory_order_relaxed);
    if (local != memory_->local_rank() && told != 0 && now_ms - told < 1e3 * seconds / 2) return again;
  }
  own.warned_ms.store(now_ms, std::memory_order_relaxed);
  const bool inline_path = !OnCommunicationThread();
  Warn((inline_path ? "'" + std::string(running_inline_->name) + "'" : Label(*running_)) +
       " is under way, but has not moved for " + std::to_string(static_cast<int>(seconds)) +
       " s: " + places_.Of(transport_.rank) + " waits for " + waits_for + "." + Suspects() +
       (deadline_s_ > 0 ? " It fails after " + std::to_string(static_cast<int>(deadline_s_)) + " s." : ""));
  return again;
}

std::string Engine::Suspects() const {
  std::string text;
  const double now = Now();
  for (int rank = 0; rank < transport_.size; ++rank) {
    const auto& members = memory_->members();
    const auto at = std::find(members.begin(), members.end(), rank);
    std::string trouble = places_.Trouble(rank);
    if (trouble.empty() && at != members.end() && rank != transport_.rank &&
        !ShowsLife(memory_->block(static_cast<int>(at - members.begin())), now)) {
      trouble = "gives no sign of life: it is stopped or overloaded";
    }
    if (trouble.empty()) continue;
    std::string sentence = places_.Of(rank);
    sentence[0] = 'R';
    text += " " + sentence + " " + trouble + ".";
  }
  return text + heartbeat_.Silent(now);
}

Status Engine::WithSuspects(const Status& status) const {
  if (status.code() != DDL_DEADLINE_EXCEEDED) return status;
  return {status.code(), status.message() + Suspects()};
}

Status Engine::Health() {
  // The communication thread, idle meanwhile, looks after the others many times a second and says so in the block.
  if (!OnCommunicationThread()) return HealthInline();
  const double now = Now();
  memory_->own().alive_ms.store(static_cast<int64_t>(now * 1e3), std::memory_order_relaxed);
  DDL_RETURN_IF_ERROR(watch_.Check());
  DDL_RETURN_IF_ERROR(heartbeat_.Beat(now));
  std::vector<ControlChannel::Received> aborts;
  DDL_RETURN_IF_ERROR(channel_.PollAborts(&aborts));
  for (const auto* messages : {&aborts, &early_}) {
    for (const auto& message : *messages) {
      if (TypeOf(message.bytes) == MessageType::kAbort) return DecodeReason(DecodeText(message.bytes));
    }
  }
  if (stop_ && Now() - stop_since_ > kStopGraceSeconds) {
    return ShutDownInside(transport_.rank);
  }
  return {};
}

Status Engine::HealthInline() {
  const RankBlock& own = memory_->own();
  if (own.state.load(std::memory_order_acquire) == kBroken) return DecodeReason(own.reason);
  // Close waits for this thread.
  if (stop_ && Now() - stop_since_ > kStopGraceSeconds) {
    return ShutDownInside(transport_.rank);
  }
  return Interruption();
}

Status Engine::Interruption() {
  if (running_inline_->interrupted == nullptr) return {};
  const double now = Now();
  if (interrupted_since_ > 0) {
    if (now - interrupted_since_ < kInterruptGraceSeconds) return {};
    return {DDL_ABORTED, places_.Of(transport_.rank) +
                             " was interrupted (Ctrl-C or another signal) in the middle of '" + running_inline_->name +
                             "', which did not go on"};
  }
  if (asked_at_ == 0) asked_at_ = now;
  if (now - asked_at_ < kAskCallerSeconds) return {};
  if (running_inline_->interrupted(running_inline_->user) != 0) interrupted_since_ = now;
  asked_at_ = Now();  // an answer may take long
  return {};
}

void Engine::Break(const Status& status) {
  if (!broken_.ok()) return;
  broken_ = status;
  ShowBroken(status);
  channel_.SendAbort(EncodeText(MessageType::kAbort, EncodeReason(status)));
  FailPending(status);
}

void Engine::ShowBroken(const Status& status) {
  RankBlock& own = memory_->own();
  const std::string reason = Cut(EncodeReason(status), sizeof own.reason - 1);
  std::memcpy(own.reason, reason.c_str(), reason.size() + 1);
  own.state.store(kBroken, std::memory_order_release);
  for (int local = 0; local < memory_->local_size(); ++local) {
    if (local != memory_->local_rank()) RingBell(memory_->block(local));
  }
}

bool Engine::InlineBusy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return inline_busy_;
}

void Engine::FailPending(const Status& status) {
  auto pending = std::exchange(pending_, {});
  usable_ = false;
  num_pending_ = 0;
  executor_.EndJoin();
  decisions_.clear();
  for (auto& [name, queue] : pending) {
    for (auto& request : queue) {
      Finish(*request, Pending(status, request->announcement));
    }
  }
}

Status Engine::Pending(const Status& status, const Announcement& announcement) {
  return {status.code(), status.message() + " (pending: " + Label(announcement) + ")"};
}

void Engine::Leave() {
  // A calling thread in the middle of a collective is needed by the other ranks. After a while it gives up by itself.
  while (InlineBusy()) {
    const Status health = Health();
    if (!health.ok()) Break(health);
    usleep(kInlineLookUs);
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
  for (auto& request : late) Finish(*request, closed);
  const std::string abandoned = pending_.empty() ? "" : Label(pending_.begin()->second.front()->announcement);
  FailPending(closed);
  // What this rank has announced the others may already run, and would wait in the middle of it.
  if (!abandoned.empty()) {
    Break({DDL_UNAVAILABLE, "rank " + std::to_string(transport_.rank) + " has left while " + abandoned +
                                " was pending there (its process ended or called shutdown)"});
  }
  if (broken_.ok()) {
    if (coordinator_ != nullptr) {
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
}

}  // namespace ddl
