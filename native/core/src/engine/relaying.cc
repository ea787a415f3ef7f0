// What an engine does for the ranks behind it in the tree of the control plane, and when one before it is gone.
#include <string>
#include <utility>

#include "engine/engine.h"

namespace ddl {

void Engine::SendRelayed() {
  if (relay_ == nullptr) return;
  relay_->Tick(Now());
  for (std::string& message : relay_->TakeMessages()) channel_.Send(tree_.parent(), std::move(message));
}

void Engine::SendUndecided() {
  // What is decided, but not done, still counts as pending here: the coordinator asks again.
  if (!decisions_.empty() || !outbox_.empty() || !broken_.ok() || cut_off_by_ >= 0) return;
  Undecided undecided;
  undecided.decisions = num_decisions_;
  for (const auto& [name, queue] : pending_) {
    if (name == kJoin) continue;
    for (const auto& request : queue) undecided.announcements.push_back(request->announcement);
  }
  const auto join = pending_.find(kJoin);
  if (join != pending_.end()) undecided.announcements.push_back(join->second.front()->announcement);
  channel_.Send(0, EncodeUndecided(undecided));
}

void Engine::CutOff(int by) {
  if (cut_off_by_ >= 0) return;
  cut_off_by_ = by;
  for (const ControlTree::Child& child : tree_.children()) {
    if (gone_.count(child.rank) == 0) channel_.Send(child.rank, EncodeCutOff(by));
  }
}

Status Engine::CutOffStatus(const Announcement& announcement) const {
  return {DDL_UNAVAILABLE, DescribeLeft(announcement, cut_off_by_, locations_)};
}

void Engine::FollowDepartures() {
  if (!broken_.ok() || !decisions_.empty() || !outbox_.empty()) return;
  if (coordinator_left_ && (num_decisions_ >= decisions_before_ || cut_off_by_ >= 0)) {
    broken_ = {DDL_UNAVAILABLE, farewell_};
    FailPending(broken_);
    return;
  }
  if (cut_off_by_ < 0 || num_pending_ == 0) return;
  auto pending = std::exchange(pending_, {});
  num_pending_ = 0;
  executor_.EndJoin();
  for (const auto& [name, queue] : pending) {
    for (const auto& request : queue) Finish(*request, CutOffStatus(request->announcement));
  }
}

}  // namespace ddl
