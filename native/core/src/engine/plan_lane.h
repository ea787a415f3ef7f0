// PlanLane: how ranks agree on what runs next by plan, without asking the coordinator. Part of a PlannedQueue, whose
// endpoint carries its messages. No method blocks.
//
// Ranks agree in rounds. In each round, a rank posts its next request (plan, index, run, name, all terms) in the memory
// of its group, as soon as it has the request. When all ranks of the group have posted, and the leaders of the groups
// have exchanged these posts (dissemination, ceil(log2(groups)) messages of 104 bytes from each; Hensgen, Finkel and
// Manber 1988), every rank knows whether all posts were equal. If so, all ranks run the collective. If not, each rank's
// run falls back to the coordinator, which matches by name and tells every rank which ranks differ in what. Nothing is
// sent to rank 0.
//
// No round lasts long: some time after others have posted, a rank that has nothing to run posts an empty post, which
// never equals another one.
#ifndef KERAS_DDL_CORE_ENGINE_PLAN_LANE_H_
#define KERAS_DDL_CORE_ENGINE_PLAN_LANE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/engine_block.h"
#include "engine/planned_runs.h"
#include "net/owned_messages.h"
#include "shm/group_memory.h"

namespace ddl {

class PlanLane {
 public:
  // `group[r]`: leader of rank r's group. `patience_s`: how long others wait for a rank that has nothing to post.
  PlanLane(const ddl_transport& transport, GroupMemory& memory, const std::vector<int>& group, double patience_s,
           PlannedRuns::FallBack fall_back);

  PlannedRuns& runs() { return runs_; }
  const PlannedRuns& runs() const { return runs_; }
  // Does everything that is possible without waiting. *run: the request that all ranks run now, or nullptr. *worked:
  // set if anything was done.
  Status Progress(double now, std::unique_ptr<Request>* run, bool* worked);
  // Called when a rank, this one or another, has failed in its run of a plan. Until Resume this rank waits for nobody,
  // and its runs fall back.
  void Suspend() { suspended_ = true; }
  // Called when nothing is pending on any rank. COLLECTIVE, before any rank submits anything else.
  void Resume();
  // Since when this rank has waited for others to post; 0: it does not wait.
  double waits_since() const { return posted_ ? posted_at_ : 0; }
  const Request* posted() const { return posted_request_; }
  // Whether a rank of this group has left without posting: this round will never end.
  bool HasLost() const;
  // The rank(s) that this one waits for, for people.
  std::vector<int> Missing() const;
  // Whether messages are expected, whose arrival rings no bell.
  bool NeedsPolling() const { return posted_ && is_leader() && leaders_.size() > 1; }
  // Cancels messages in flight. Required before the transport is destroyed.
  void Cancel();

 private:
  struct Message {
    uint64_t round = 0;
    uint64_t step = 0;  // of the dissemination; kHint: the round has begun
    PlanPost post;
  };
  static constexpr uint64_t kHint = ~uint64_t{0};

  bool is_leader() const { return memory_.local_rank() == 0; }
  bool HasBegun() const;
  void Post(const Request* request, uint64_t number, double now);
  bool GroupIsComplete() const;
  // All posts of the group, combined.
  PlanPost GroupsPost() const;
  static void Combine(const PlanPost& other, PlanPost* into);
  Status Exchange(double now, bool* worked);
  Status Receive(bool* worked);
  Status Send(size_t to, const Message& message);
  Status SendHints();
  void End(const PlanPost& outcome, double now, std::unique_ptr<Request>* run);

  const ddl_transport& transport_;
  GroupMemory& memory_;
  const double patience_s_;
  PlannedRuns runs_;
  std::vector<int> leaders_;  // of the groups, ascending
  size_t group_ = 0;          // this rank's
  OwnedMessages sends_;
  OwnedMessages receives_;
  uint64_t round_ = 0;  // rounds that have ended
  bool posted_ = false;
  double posted_at_ = 0;
  const Request* posted_request_ = nullptr;  // nullptr: nothing
  uint64_t posted_number_ = 0;
  bool suspended_ = false;
  double begun_at_ = 0;  // when this rank saw others begin the round; 0: not yet
  // The leader's part of the exchange: the posts combined so far, and the next step.
  bool exchanging_ = false;
  bool hinted_ = false;
  uint64_t step_ = 0;
  PlanPost known_{};
  std::map<std::pair<uint64_t, uint64_t>, PlanPost> arrived_;  // by round and step
  uint64_t failures_ = 0;                                      // recent rounds without agreement
  uint64_t good_ = 0;                                          // rounds with agreement since
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_PLAN_LANE_H_
