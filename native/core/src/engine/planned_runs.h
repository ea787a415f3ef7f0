// PlannedRuns: the requests of plans that a rank has submitted, in the order in which the plans run them. A plan is the
// list of collectives of a step, equal on all ranks; a run is one step. This is the pure logic of one rank; plan_lane.h
// makes sure that all ranks do the same.
//
// Requests arrive in any order, and wait here until the requests before them have run. A run that cannot continue falls
// back: its requests, including those that still arrive, go to the coordinator, which matches by name.
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
  // Passes a request on to the coordinated queue.
  using FallBack = std::function<void(std::unique_ptr<Request>)>;
  explicit PlannedRuns(FallBack fall_back) : fall_back_(std::move(fall_back)) {}

  void Add(std::unique_ptr<Request> request, double now);
  // The collective at `place` has run inline, on all ranks.
  void Skip(const PlanPlace& place, double now);

  // The request that runs next if it has arrived, else nullptr. `*number`: the number of its run. Ranks that have begun
  // equally many runs give the same run the same number.
  Request* Next(uint64_t* number);
  // Takes the request that Next has returned.
  std::unique_ptr<Request> Take(double now);
  // Called when a round has ended without agreement. Runs up to number `until` fall back, now or when they begin.
  // `number`: the highest number that a rank has posted. If this rank has `posted` a run, that run has this number from
  // now on. If not, its run may come late, and is then numbered, or it never comes. It never comes if a run of this
  // rank has fallen back by its number since the last such round, but the rank is still behind. Then it no longer waits
  // for that run.
  void FallBackUntil(uint64_t until, uint64_t number, bool posted);
  // The first run falls back if its next request has not arrived for `patience_s`, though later ones have.
  void FallBackIfStuck(double now, double patience_s);
  void FallBackAll();
  // From now on, all ranks that have called this equally often number runs identically, however many runs each has
  // begun. REQUIRES: nothing waits.
  void Renumber() {
    begun_ = ++renumbered_ << 32;
    fell_back_by_number_ = false;
  }
  // Removes and returns everything that waits.
  std::vector<std::unique_ptr<Request>> TakeAll();
  bool empty() const { return runs_.empty(); }

 private:
  struct Run {
    PlanPlace place;
    uint64_t number = 0;  // 0: not begun
    uint32_t next = 0;
    uint32_t waiting = 0;    // requests that are here
    double advanced_at = 0;  // when `next` last changed
    std::vector<std::unique_ptr<Request>> requests;
    std::vector<bool> arrived;
  };
  static bool IsOf(const Run& run, const PlanPlace& place);
  Run& RunOf(const PlanPlace& place, double now);
  // Marks `place` as arrived if its run has fallen back; false: it has not.
  bool ArrivesLate(const PlanPlace& place);
  void Advance(double now);
  void Begin();
  void FallBackFirst();

  const FallBack fall_back_;
  std::deque<Run> runs_;
  std::deque<Run> fallen_back_;  // the last few with requests that have not arrived
  uint64_t begun_ = 0;
  uint64_t renumbered_ = 0;
  uint64_t fall_back_until_ = 0;
  bool fell_back_by_number_ = false;  // since the last round without agreement
  // Every request that fell back and has not ended has a copy, so that later requests of the same names do not overtake
  // it.
  std::shared_ptr<int> ticket_ = std::make_shared<int>(0);
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_PLANNED_RUNS_H_
