// How an engine runs what follows a plan: with a lane (plan_lane.h), an engine of its own that does nothing else.
#include <string>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "engine/engine.h"
#include "shm/doorbell.h"

namespace ddl {

Status Engine::AddLane(const ddl_transport& transport, const ddl_options& options) {
  if (own_lane_ != nullptr) {
    transport.destroy(transport.self);
    return {DDL_FAILED_PRECONDITION, "the communicator has a lane already"};
  }
  DDL_RETURN_IF_ERROR(Create(transport, options, &own_lane_, this));
  planned_engine_.store(own_lane_.get(), std::memory_order_release);
  return {};
}

void Engine::Skip(const PlanPlace& place) {
  auto mark = std::make_unique<Request>();
  mark->place = place;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) return;
  // In the order of the requests: the same place may come again. Nothing has to wake for it unless something waits.
  submitted_.push_back(std::move(mark));
  if (OwnBlock(*memory_).outstanding.load(std::memory_order_relaxed) > 0) RingBell(memory_->own());
}

void Engine::HurryLane() {
  Engine* const lane = planned_engine_.load(std::memory_order_acquire);
  if (lane == nullptr) return;
  const std::lock_guard<std::mutex> lock(lane->mutex_);
  if (lane->stop_) return;
  lane->hurries_ = true;
  RingBell(lane->memory_->own());
}

void Engine::ResumeLane() {
  Engine* const lane = planned_engine_.load(std::memory_order_acquire);
  if (lane == nullptr) return;
  auto mark = std::make_unique<Request>();  // before whatever is submitted from now on
  const std::lock_guard<std::mutex> lock(lane->mutex_);
  if (lane->stop_) return;
  lane->hurries_ = false;
  lane->submitted_.push_back(std::move(mark));
  RingBell(lane->memory_->own());
}

bool Engine::RunPlanned() {
  if (lane_ == nullptr) return false;
  if (hurries_) lane_->Hurry();
  if (!broken_.ok()) {
    const bool any = !lane_->runs().empty();
    lane_->runs().DemoteAll();
    return any;
  }
  bool moved = false;
  std::unique_ptr<Request> request;
  Status status = lane_->Progress(Now(), &request, &moved);
  if (!status.ok()) {
    Break(status);
    return true;
  }
  if (request == nullptr) return moved;
  planned_.fetch_add(1, std::memory_order_relaxed);
  const double started = Trace::Stamp();
  bool broken = false;
  Decision decision;
  if (request->announcement.kind == DDL_ALL_GATHER) {
    decision.rows.assign(static_cast<size_t>(transport_.size), request->announcement.rows);  // as all ranks have posted
  }
  BeginRun(request->announcement);
  status = executor_.Run(*request, decision, &broken);
  status = EndRun(status, broken);
  if (started > 0) request->TraceRun(started, started, status.code());
  Finish(*request, status);
  return true;
}

void Engine::CheckLane() {
  if (lane_->HasLost()) {
    CloseLane("a rank has left");
    return;
  }
  const double since = lane_->waits_since();
  if (since == 0) {
    warn_lane_after_ = warn_after_s_;
    return;
  }
  const double waited = Now() - since;
  const std::string what = lane_->posted() == nullptr ? "A plan" : Label(lane_->posted()->announcement);
  const std::string waits = what + " has waited " + std::to_string(static_cast<int>(waited)) + " s for " +
                            lane_->DescribeMissing() + ", whose communication thread does not answer." +
                            DescribeSuspects();
  if (deadline_s_ > 0 && waited > deadline_s_) {
    Break({DDL_DEADLINE_EXCEEDED, waits + " Raise KERAS_DDL_DEADLINE_SECONDS if it is only slow."});
  } else if (warn_lane_after_ > 0 && waited > warn_lane_after_) {
    warn_lane_after_ = 2 * waited;
    if (!WarnsForGroup(waited)) return;
    Warn(waits + (deadline_s_ > 0 ? " It fails after " + std::to_string(static_cast<int>(deadline_s_)) + " s." : ""));
  }
}

void Engine::CloseLane(const std::string& why) {
  if (!broken_.ok()) return;
  broken_ = {DDL_UNAVAILABLE, why};
  lane_->runs().DemoteAll();
  if (coordinator_ == nullptr) return;
  const std::string text = EncodeText(MessageType::kLeave, why);
  for (int rank = 1; rank < transport_.size; ++rank) {
    if (!coordinator_->HasLeft(rank)) channel_.Send(rank, text);
  }
}

}  // namespace ddl
