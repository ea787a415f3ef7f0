// PlannedQueue: runs the collectives of plans in the order of the plan, without asking rank 0. Ranks agree by posting
// their next requests (plan_lane.h). Requests that do not follow their plan fall back to the coordinated queue of the
// same ranks.
//
// Its endpoint (thread, memory and messages) is separate from the coordinated queue's, so that planned collectives and
// collectives that the coordinator has decided never wait for each other.
#ifndef KERAS_DDL_CORE_ENGINE_PLANNED_QUEUE_H_
#define KERAS_DDL_CORE_ENGINE_PLANNED_QUEUE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/plan_lane.h"
#include "engine/queue.h"

namespace ddl {

class PlannedQueue : public Queue {
 public:
  // `fallback`: the submissions of the coordinated queue. It must outlive this.
  PlannedQueue(Endpoint& endpoint, Submissions& fallback);

  // Any thread.
  void Submit(std::unique_ptr<Request> request);
  // Any thread. The collective at `place` has run inline, on all ranks.
  void Skip(const PlanPlace& place);
  // Any thread. When a rank fails: see PlanLane::Suspend and Resume.
  void Suspend();
  void Resume();
  bool HasOutstanding() { return submissions_.HasOutstanding(); }
  // Any thread. Whether small data waits here, which later small data must not overtake inline.
  bool HasSmall() const { return num_small_.load(std::memory_order_relaxed) > 0; }
  // Any thread. Collectives that have run here, and that fell back.
  uint64_t num_run() const { return num_run_; }
  uint64_t num_fallbacks() const { return num_fallbacks_; }

  bool Progress() override;
  bool AnyPending() const override { return !lane_.runs().empty(); }
  bool ExpectsSoon() const override { return lane_.waits_since() > 0; }
  int64_t SleepUs(double idle_s) const override;

 protected:
  void Add(std::unique_ptr<Request> request) override;
  void Handle(int peer, const std::string& bytes) override;
  void CheckDeadlines() override;
  void Fail(const Status& status) override;
  std::string DescribePromised() const override;
  void Cancel() override { lane_.Cancel(); }
  void Finish(const Request& request, const Status& status) override;

 private:
  void CountSmall(int change);
  void FallBack(std::unique_ptr<Request> request);
  // Called when some rank has left. Requests that are submitted from now on fall back.
  void Close(const std::string& reason);

  Submissions& fallback_;
  PlanLane lane_;
  double warn_after_ = 0;
  std::atomic<bool> suspended_{false};
  std::atomic<int> num_small_{0};  // requests here whose data could go through a rendezvous
  std::atomic<uint64_t> num_run_{0};
  std::atomic<uint64_t> num_fallbacks_{0};
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_PLANNED_QUEUE_H_
