// How an endpoint detects failures, and gives up the communicator.
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "base/text.h"
#include "control/coordinator.h"
#include "engine/endpoint.h"
#include "shm/doorbell.h"

namespace ddl {
namespace {

// How long a leaving rank waits for its last messages to be sent.
constexpr double kLeaveSeconds = 1.0;
// How long a running collective has to finish when the process shuts down.
constexpr double kStopGraceSeconds = 2.0;

thread_local bool on_communication_thread = false;

}  // namespace

void Endpoint::EnterCommunicationThread() { on_communication_thread = true; }

Status Endpoint::Health() {
  // The communication thread, idle meanwhile, checks on the others many times a second and records that in the block.
  if (!on_communication_thread) return health_of_caller_();
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
  return CheckStopped();
}

void Endpoint::OnCallingThread(std::function<Status()> health, std::function<std::string()> running) {
  health_of_caller_ = std::move(health);
  running_of_caller_ = std::move(running);
}

Status Endpoint::CheckStopped() const {
  if (submissions_.seconds_stopped() <= kStopGraceSeconds) return {};
  return {DDL_NOT_FOUND, "the communicator has been shut down in the middle of it"};
}

Status Endpoint::ForOthers(const Status& status) const {
  if (status.code() != DDL_NOT_FOUND) return status;
  return {DDL_UNAVAILABLE,
          "rank " + std::to_string(transport_.rank) +
              " has left during a collective (its process ended or called shutdown)",
          {{transport_.rank, DDL_RANK_LEFT}}};
}

void Endpoint::Break(const Status& status) {
  if (!broken_.ok()) return;
  broken_ = status;
  PublishBroken(status);
  channel_.SendAbort(EncodeText(MessageType::kAbort, EncodeReason(ForOthers(status), kMaxError)));
  on_broken_(status);
}

void Endpoint::PublishBroken(const Status& status) {
  RankBlock& own = memory_->own();
  // Others read `reason` from then on.
  if (own.state.load(std::memory_order_relaxed) == kBroken) return;
  const std::string reason = EncodeReason(ForOthers(status), sizeof own.reason - 1);
  std::memcpy(own.reason, reason.c_str(), reason.size() + 1);
  own.state.store(kBroken, std::memory_order_release);
  for (int local = 0; local < memory_->local_size(); ++local) {
    if (local != memory_->local_rank()) RingBell(memory_->block(local));
  }
}

void Endpoint::PublishLeft() { memory_->own().state.store(kLeft, std::memory_order_release); }

void Endpoint::Warn(const std::string& message) const {
  if (warn_ != nullptr) {
    warn_(warn_user_, message.c_str());
  } else {
    std::fprintf(stderr, "keras_ddl: %s\n", message.c_str());
  }
}

bool Endpoint::WarnsForGroup(double seconds) {
  const auto now_ms = static_cast<int64_t>(Now() * 1e3);
  for (int local = 0; local < memory_->local_size(); ++local) {
    const int64_t warned = memory_->block(local).warned_ms.load(std::memory_order_relaxed);
    if (local != memory_->local_rank() && warned != 0 && now_ms - warned < 1e3 * seconds / 2) return false;
  }
  memory_->own().warned_ms.store(now_ms, std::memory_order_relaxed);
  return true;
}

double Endpoint::WarnStalled(const std::string& waits_for, double seconds) {
  const double again = 2 * seconds;
  if (!WarnsForGroup(seconds)) return again;
  Warn((on_communication_thread ? Label(*running_) : running_of_caller_()) +
       " is running, but has made no progress for " + std::to_string(static_cast<int>(seconds)) +
       " s: " + locations_.Describe(transport_.rank) + " waits for " + waits_for + "." + DescribeSuspects() +
       DescribeDeadline());
  return again;
}

std::string Endpoint::DescribeSuspects(FailedRanks* ranks) const {
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
    if (ranks != nullptr) ranks->push_back({rank, DDL_RANK_SILENT});
  }
  return text + heartbeat_.DescribeSilence(now, ranks);
}

Status Endpoint::WithSuspects(const Status& status) const {
  if (status.code() != DDL_DEADLINE_EXCEEDED) return status;
  FailedRanks suspects;
  const std::string text = DescribeSuspects(&suspects);
  return status.Reworded(status.message() + text, suspects);
}

std::string Endpoint::DescribeDeadline() const {
  return deadline_s_ > 0 ? " It fails after " + std::to_string(static_cast<int>(deadline_s_)) + " s." : "";
}

void Endpoint::Drain() {
  std::vector<ControlChannel::Received> ignored;
  const double start = Now();
  while (!channel_.Idle() && Now() - start < kLeaveSeconds && channel_.Poll(&ignored).ok()) sched_yield();
  channel_.Cancel();
  heartbeat_.Cancel();
}

}  // namespace ddl
