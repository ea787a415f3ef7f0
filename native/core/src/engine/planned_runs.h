// PlannedRuns: what a rank has submitted of plans, in the order in which the plans say it runs. A plan is the list of
// collectives of a step, equal on all ranks; a run is one step. Pure logic, of one rank: plan_lane.h makes sure that
// all ranks do the same.
//
// Requests arrive in any order and are held back until those before them have run. A run that cannot go on is demoted:
// what there is of it, and what still comes, goes to the coordinator, which matches by name.
#ifndef KERAS_DDL_CORE_ENGINE_PLANNED_RUNS_H_
#define KERAS_DDL_CORE_ENGINE_PLANNED_RUNS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/request.h"

namespace ddl {

class PlannedRuns {
 public:
  using Demote = std::function<void(std::unique_ptr<Request>)>;
  explicit PlannedRuns(Demote demote) : demote_(std::move(demote)) {}

  void Add(std::unique_ptr<Request> request, double now);
  // This one was run elsewhere, on all ranks.
  void Skip(const PlanPlace& place, double now);

  // The request that runs next if it has come, else nullptr. `*number`: of its run; ranks that have begun equally many
  // runs give the same one the same number.
  Request* Next(uint64_t* number);
  // Takes what Next has returned.
  std::unique_ptr<Request> Take(double now);
  // Ranks have found out that they do not do the same: runs up to number `until` are demoted, now or when they begin.
  // `number`: the highest that a rank has posted, which from now on is that of this rank's run, too, if it has `posted`
  // one. If it has not, its own run may come late, and count then; or it never comes. That shows when this rank has
  // passed over a run since the last time, and is behind all the same: then it no longer waits for it.
  void DemoteUntil(uint64_t until, uint64_t number, bool posted);
  // Demotes a run whose next request has not come for `patience_s`, though later ones have.
  void DemoteStuck(double now, double patience_s);
  // Demotes everything.
  void DemoteAll();
  // From here on runs are numbered alike on all ranks that call this equally often, however many each has begun.
  // REQUIRES: nothing waits.
  void Renumber() {
    begun_ = ++renumbered_ << 32;
    passed_ = false;
  }
  // Gives back everything that waits.
  std::vector<std::unique_ptr<Request>> TakeAll();
  bool empty() const { return runs_.empty(); }

 private:
  struct Run {
    PlanPlace place;
    uint64_t number = 0;  // 0: not begun
    uint32_t next = 0;
    uint32_t waiting = 0;  // requests held back
    double moved = 0;      // when `next` last changed
    std::vector<std::unique_ptr<Request>> requests;
    std::vector<bool> came;
  };
  static bool IsOf(const Run& run, const PlanPlace& place);
  Run& RunOf(const PlanPlace& place, double now);
  void Advance(double now);
  void Begin();
  // What the first run holds, and what still comes of it.
  void DemoteFirst();

  const Demote demote_;
  std::deque<Run> runs_;
  std::deque<Run> demoted_;  // the last few, of which something may still come
  uint64_t begun_ = 0;
  uint64_t renumbered_ = 0;
  uint64_t demoted_until_ = 0;
  bool passed_ = false;  // whether a run was demoted by its number since ranks have last found out
  // Every request that was demoted and has not ended holds a copy: what comes later under the same names must not
  // overtake it.
  std::shared_ptr<int> ticket_ = std::make_shared<int>(0);
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_PLANNED_RUNS_H_
