#include "engine/plan_lane.h"

#include <algorithm>
#include <cstring>

#include "base/tags.h"
#include "base/waiter.h"
#include "common/hash.h"
#include "control/coordinator.h"
#include "shm/doorbell.h"

namespace ddl {
namespace {

// Back-off: from the second round without agreement on, the next runs skip the lane, twice as many each time (up to
// kMostSkipped), because a late rank may be late in every run. kGoodRounds rounds with agreement in a row reset it.
constexpr uint64_t kMostSkipped = 64;
constexpr uint64_t kGoodRounds = 64;

std::vector<int> LeadersOf(const std::vector<int>& group) {
  std::vector<int> leaders;
  for (size_t r = 0; r < group.size(); ++r) {
    if (group[r] == static_cast<int>(r)) leaders.push_back(group[r]);
  }
  return leaders;
}

PlanPost PostOf(const Request* request, uint64_t number) {
  PlanPost post{};
  if (request == nullptr) return post;
  post.equal = 1;
  post.number = number;
  post.what[0] = request->place.plan;
  post.what[1] = uint64_t{request->place.size} << 32 | request->place.index;
  const Announcement& a = request->announcement;
  // If rows are free, they are not among the terms, but in a plan those of an all_gather must be equal on all ranks. An
  // all_to_all with wrong splits differs from all others, so that the coordinator fails it on all ranks.
  if (a.kind == DDL_ALL_TO_ALL && !SplitsAreValid(a.splits.data(), a.splits.size(), a.rows)) post.equal = 0;
  post.what[2] = HashNumber(a.kind == DDL_ALL_GATHER ? a.rows : 0, Hash(a.name));
  const TermWords words = WordsOf(a);
  static_assert(sizeof words == sizeof post.what - 3 * sizeof post.what[0]);
  std::copy(words.begin(), words.end(), post.what + 3);
  return post;
}

}  // namespace

PlanLane::PlanLane(const ddl_transport& transport, GroupMemory& memory, const std::vector<int>& group,
                   double patience_s, PlannedRuns::FallBack fall_back)
    : transport_(transport),
      memory_(memory),
      patience_s_(patience_s),
      runs_(std::move(fall_back)),
      leaders_(LeadersOf(group)),
      sends_(transport),
      receives_(transport) {
  const int leader = group[static_cast<size_t>(transport.rank)];
  group_ = static_cast<size_t>(std::find(leaders_.begin(), leaders_.end(), leader) - leaders_.begin());
}

bool PlanLane::HasBegun() const {
  if (BlockOf(memory_, 0).plan_begun.load(std::memory_order_acquire) > round_) return true;
  for (int local = 0; local < memory_.local_size(); ++local) {
    if (BlockOf(memory_, local).plan_posted.load(std::memory_order_acquire) > round_) return true;
  }
  return false;
}

void PlanLane::Post(const Request* request, uint64_t number, double now) {
  EngineBlock& own = OwnBlock(memory_);
  own.plan_posts[round_ % 2] = PostOf(request, number);
  own.plan_posted.store(round_ + 1, std::memory_order_seq_cst);
  posted_ = true;
  posted_at_ = now;
  posted_request_ = request;
  posted_number_ = request == nullptr ? 0 : number;
  // The last rank to post wakes the others, which sleep until then. If two post at the same time, at least one sees
  // both.
  if (!GroupIsComplete()) return;
  for (int local = 0; local < memory_.local_size(); ++local) {
    if (local != memory_.local_rank()) RingBell(memory_.block(local));
  }
}

bool PlanLane::GroupIsComplete() const {
  for (int local = 0; local < memory_.local_size(); ++local) {
    if (BlockOf(memory_, local).plan_posted.load(std::memory_order_seq_cst) <= round_) return false;
  }
  return true;
}

void PlanLane::Combine(const PlanPost& other, PlanPost* into) {
  const bool equal = other.equal != 0 && into->equal != 0 && other.number == into->number &&
                     std::memcmp(other.what, into->what, sizeof other.what) == 0;
  into->equal = equal ? 1 : 0;
  into->number = std::max(into->number, other.number);
}

PlanPost PlanLane::GroupsPost() const {
  PlanPost all = BlockOf(memory_, 0).plan_posts[round_ % 2];
  for (int local = 1; local < memory_.local_size(); ++local)
    Combine(BlockOf(memory_, local).plan_posts[round_ % 2], &all);
  return all;
}

Status PlanLane::Progress(double now, std::unique_ptr<Request>* run, bool* worked) {
  const double patience_s = suspended_ ? 0 : patience_s_;
  if (suspended_ && !posted_) runs_.FallBackAll();  // a posted request may still run, on all ranks
  runs_.FallBackIfStuck(now, patience_s);
  if (leaders_.size() > 1 && is_leader()) DDL_RETURN_IF_ERROR(Receive(worked));
  if (!posted_) {
    uint64_t number = 0;
    const Request* const next = runs_.Next(&number);
    if (next == nullptr) {
      if (!HasBegun()) return {};
      if (begun_at_ == 0) begun_at_ = now;
      if (now - begun_at_ < patience_s) return {};
    }
    Post(next, number, now);
    *worked = true;
  }
  if (leaders_.size() == 1) {
    if (GroupIsComplete()) {
      *worked = true;
      End(GroupsPost(), now, run);
    }
    return {};
  }
  if (is_leader()) DDL_RETURN_IF_ERROR(Exchange(now, worked));
  const EngineBlock& leader = BlockOf(memory_, 0);
  if (leader.plan_decided.load(std::memory_order_acquire) <= round_) return {};
  *worked = true;
  End(leader.plan_outcomes[round_ % 2], now, run);
  return {};
}

Status PlanLane::Exchange(double now, bool* worked) {
  if (!exchanging_) {
    if (!GroupIsComplete()) {
      // Groups that have nothing to run may not know yet that others wait for them.
      if (!hinted_ && now - posted_at_ > patience_s_ / 4) DDL_RETURN_IF_ERROR(SendHints());
      return {};
    }
    exchanging_ = true;
    step_ = 0;
    known_ = GroupsPost();
    DDL_RETURN_IF_ERROR(Send((group_ + 1) % leaders_.size(), {round_, 0, known_}));
    *worked = true;
  }
  const size_t groups = leaders_.size();
  for (;;) {
    const auto arrived = arrived_.find({round_, step_});
    if (arrived == arrived_.end()) {
      if (!hinted_ && now - posted_at_ > patience_s_ / 4) DDL_RETURN_IF_ERROR(SendHints());
      return {};
    }
    Combine(arrived->second, &known_);
    arrived_.erase(arrived);
    *worked = true;
    const size_t distance = size_t{1} << ++step_;
    if (distance >= groups) break;
    DDL_RETURN_IF_ERROR(Send((group_ + distance) % groups, {round_, step_, known_}));
  }
  exchanging_ = false;
  EngineBlock& own = OwnBlock(memory_);
  own.plan_outcomes[round_ % 2] = known_;
  own.plan_decided.store(round_ + 1, std::memory_order_release);
  for (int local = 1; local < memory_.local_size(); ++local) RingBell(memory_.block(local));
  return {};
}

Status PlanLane::Send(size_t to, const Message& message) {
  return sends_.Send(leaders_[to], kPlanTag, {reinterpret_cast<const char*>(&message), sizeof message});
}

Status PlanLane::SendHints() {
  hinted_ = true;
  for (size_t distance = 1; distance < leaders_.size(); distance *= 2) {
    DDL_RETURN_IF_ERROR(Send((group_ + distance) % leaders_.size(), {round_, kHint, {}}));
  }
  return {};
}

Status PlanLane::Receive(bool* worked) {
  std::vector<OwnedMessages::Finished> finished;
  if (!sends_.empty()) DDL_RETURN_IF_ERROR(sends_.TakeFinished(&finished));
  DDL_RETURN_IF_ERROR(receives_.ReceiveArriving(kPlanTag));
  if (!receives_.empty()) DDL_RETURN_IF_ERROR(receives_.TakeFinished(&finished));
  for (const auto& [peer, bytes] : finished) {
    Message message;
    std::memcpy(&message, bytes.data(), std::min(bytes.size(), sizeof message));
    if (message.round < round_) continue;  // a late hint
    *worked = true;
    const bool hint = message.step == kHint;
    if (!hint) arrived_[{message.round, message.step}] = message.post;
    EngineBlock& own = OwnBlock(memory_);
    if (own.plan_begun.load(std::memory_order_relaxed) > message.round) continue;
    own.plan_begun.store(message.round + 1, std::memory_order_release);
    // The ranks of this group notice it at their next poll, within some tens of milliseconds.
    if (hint && !hinted_ && message.round == round_) DDL_RETURN_IF_ERROR(SendHints());
  }
  return {};
}

void PlanLane::End(const PlanPost& outcome, double now, std::unique_ptr<Request>* run) {
  const uint64_t posted_number = posted_number_;
  ++round_;
  posted_ = hinted_ = false;
  posted_request_ = nullptr;
  begun_at_ = 0;
  if (outcome.equal != 0) {
    if (++good_ >= kGoodRounds) failures_ = 0;
    *run = runs_.Take(now);
    return;
  }
  good_ = 0;
  const uint64_t skipped = failures_ == 0 ? 0 : std::min(kMostSkipped, uint64_t{1} << std::min<uint64_t>(failures_, 7));
  ++failures_;
  runs_.FallBackUntil(outcome.number + skipped, outcome.number, posted_number != 0);
}

void PlanLane::Resume() {
  suspended_ = false;
  failures_ = 0;
  runs_.FallBackAll();
  runs_.Renumber();
}

bool PlanLane::HasLost() const {
  for (int local = 0; local < memory_.local_size(); ++local) {
    // Checked in this order, because the rank posts first and then leaves.
    if (memory_.block(local).state.load(std::memory_order_acquire) == kLeft &&
        BlockOf(memory_, local).plan_posted.load(std::memory_order_acquire) <= round_) {
      return true;
    }
  }
  return false;
}

std::vector<int> PlanLane::Missing() const {
  std::vector<int> ranks;
  for (int local = 0; local < memory_.local_size(); ++local) {
    if (BlockOf(memory_, local).plan_posted.load(std::memory_order_acquire) > round_) continue;
    ranks.push_back(memory_.members()[static_cast<size_t>(local)]);
  }
  if (!ranks.empty()) return ranks;
  if (!exchanging_) return {memory_.members()[0]};
  const size_t groups = leaders_.size();
  return {leaders_[(group_ + groups - (size_t{1} << step_) % groups) % groups]};
}

void PlanLane::Cancel() {
  const double give_up = Now() + OwnedMessages::kCancelSeconds;
  sends_.Cancel(give_up);
  receives_.Cancel(give_up);
}

}  // namespace ddl
