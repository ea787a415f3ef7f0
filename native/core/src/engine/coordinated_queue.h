// CoordinatedQueue: runs requests in the order that the coordinator (rank 0) decides. Each rank announces its requests.
// When all ranks have announced a collective, the coordinator sends them the decision to run it, or why it fails.
//
// A rank that has joined takes part in the other ranks' collectives, and submits none until all ranks have joined.
#ifndef KERAS_DDL_CORE_ENGINE_COORDINATED_QUEUE_H_
#define KERAS_DDL_CORE_ENGINE_COORDINATED_QUEUE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "control/coordinator.h"
#include "control/known_collectives.h"
#include "engine/planned_queue.h"
#include "engine/queue.h"
#include "liveness/stack_position.h"

namespace ddl {

class CoordinatedQueue : public Queue {
 public:
  explicit CoordinatedQueue(Endpoint& endpoint);

  // Any thread. The planned queue of the same ranks, once it runs.
  void SetPlanned(PlannedQueue* planned) { planned_.store(planned, std::memory_order_release); }
  // Any thread. See ddl_wait_for_position_query and ddl_reply_position.
  StackPosition& stack_position() { return stack_position_; }
  // Any thread. Collectives that the coordinator has decided.
  uint64_t num_decided() const { return num_decided_; }

  bool Progress() override;
  bool AnyPending() const override { return num_pending_ > 0; }
  bool ExpectsSoon() const override { return num_pending_ > 0; }
  int64_t SleepUs(double idle_s) const override;

 protected:
  void Add(std::unique_ptr<Request> request) override;
  void Handle(int peer, const std::string& bytes) override;
  void CheckDeadlines() override;
  void Fail(const Status& status) override;
  std::string DescribePromised() const override;
  void SendLast() override;

 private:
  // A join has no name; other requests have one.
  static constexpr const char* kJoin = "";

  void Announce(const Announcement& announcement);
  // Rank 0: sends the coordinator's decisions to the other ranks, and to this one.
  bool DeliverVerdicts();
  // Sends the first of the outbox, once, to the ranks that have not left.
  void SendVerdict();
  void Decided(Decision decision);
  bool RunDecisions();
  void RunDecision(const Decision& decision);
  bool HasJoined() const { return pending_.count(kJoin) != 0; }
  void EndJoin(const Decision& decision);
  void FailWithoutCoordinator();

  // Rank 0 asks missing ranks for their position; this rank replies.
  void ExchangePositions();
  void ReportPosition();
  void SendPosition(MessageType type, const std::string& text);

  std::unique_ptr<Coordinator> coordinator_;  // on rank 0
  KnownCollectives known_;                    // on the others
  std::deque<Verdict> outbox_;                // on rank 0: decided, but not yet known to every rank concerned
  bool outbox_front_sent_ = false;
  bool coordinator_left_ = false;
  std::string leave_reason_;  // as the coordinator gave it
  std::unordered_map<std::string, std::deque<std::unique_ptr<Request>>> pending_;
  size_t num_pending_ = 0;
  std::deque<Decision> decisions_;  // to be run here
  StackPosition stack_position_;
  std::atomic<PlannedQueue*> planned_{nullptr};
  std::atomic<uint64_t> num_decided_{0};
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_COORDINATED_QUEUE_H_
