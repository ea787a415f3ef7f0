// Engine: one rank's end of a communicator. Any thread submits; one communication thread announces, takes decisions
// and runs the collectives, in the order the coordinator (rank 0's engine) decided. Where all ranks share memory,
// calling threads that come to a collective together run it themselves (inline_rendezvous.h).
#ifndef KERAS_DDL_CORE_ENGINE_ENGINE_H_
#define KERAS_DDL_CORE_ENGINE_ENGINE_H_

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/waiter.h"
#include "control/channel.h"
#include "control/coordinator.h"
#include "engine/executor.h"
#include "engine/inline_rendezvous.h"
#include "hierarchy/hierarchical_collectives.h"
#include "liveness/heartbeat.h"
#include "liveness/peer_watch.h"
#include "liveness/places.h"
#include "liveness/stack_position.h"
#include "shm/group_memory.h"

namespace ddl {

class Engine {
 public:
  // COLLECTIVE over the ranks of the transport, which the engine owns from then on (also on failure).
  static Status Create(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<Engine>* out);
  ~Engine() { Close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void Submit(const ddl_request& request);
  // Leaves in an orderly way; see ddl_close. Submit refuses everything from then on.
  void Close();
  // See ddl_next_question and ddl_answer.
  StackPosition& stack_position() { return stack_position_; }
  void Answered();
  // inline.cc. Carries the request out on the calling thread, waiting about `patience_us` for the other ranks to
  // do the same. What it returns: see ddl_try_run; 0 also when the communicator broke, which Submit will tell.
  int TryRun(const ddl_request& request, uint32_t patience_us);

  int rank() const { return transport_.rank; }
  int size() const { return transport_.size; }
  int local_rank() const { return memory_->local_rank(); }
  int local_size() const { return memory_->local_size(); }
  const char* description() const { return description_.c_str(); }

 private:
  Engine(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<GroupMemory> memory, Places places,
         const std::vector<int>& group);

  // Starts the communication thread on every rank or on none. COLLECTIVE.
  Status Start();

  // inline.cc, on the calling thread.
  bool EnterInline();
  void LeaveInline(const Status& status);
  bool Rendezvous(uint32_t patience_us);
  Status RunInline(const ddl_request& request, bool eager);
  // See Decision::rows.
  std::vector<uint64_t> RowsAtRendezvous(const ddl_request& request) const;
  Status HealthInline();
  // DDL_ABORTED when the caller has wanted to return for a while, and can not.
  Status Interruption();
  bool InlineBusy();
  // In a child of the process that made this: memory that is shared with other ranks must be left alone.
  bool Forked() const;
  static bool OnCommunicationThread();

  // All below run on the communication thread.
  void Loop();
  bool TakeSubmissions();
  bool RunDecisions();
  void Decide(const Decision& decision);
  // Around what the executor does. After EndRun the communicator may be broken; returns what the request is told.
  void BeginRun(const Announcement& announcement);
  Status EndRun(const Status& status, bool broken);
  void Finish(const Request& request, const Status& status);
  void Idle(uint32_t seen);
  void Warn(const std::string& message) const;

  // join.cc. Whether this rank waits in a join: it takes part in the collectives of others, and submits none.
  bool HasJoined() const { return pending_.count(kJoin) != 0; }
  void TakePartJoined(const Decision& decision);
  void EndJoin(const Decision& decision);

  // messages.cc.
  void Announce(std::unique_ptr<Request> request);
  bool TakeMessages();
  void Handle(int peer, const std::string& bytes);
  bool DeliverVerdicts();

  // failure.cc.
  void WatchOver();
  void AskAndAnswer();
  void SayWhere();
  bool HasLeft(int rank);
  double WarnInside(const std::string& waits_for, double seconds);
  std::string Suspects() const;
  // A collective that made no progress: whoever gives no sign of life is named.
  Status WithSuspects(const Status& status) const;
  void TellCoordinator(MessageType type, const std::string& text);
  Status Health();
  void Break(const Status& status);
  void ShowBroken(const Status& status);
  void FailPending(const Status& status);
  // What a request that could not run is told: `status`, and which request.
  static Status Pending(const Status& status, const Announcement& announcement);
  void Leave();

  ddl_transport transport_;
  const double deadline_s_;
  void (*const warn_)(void* user, const char* message);
  void* const warn_user_;
  std::unique_ptr<GroupMemory> memory_;
  const Places places_;
  StackPosition stack_position_;
  PeerWatch watch_;
  ControlChannel channel_;
  Heartbeat heartbeat_;
  Waiter waiter_;
  HierarchicalCollectives collectives_;
  Executor executor_;
  InlineRendezvous rendezvous_;
  std::vector<const void*> sources_;          // scratch of RunInline
  std::unique_ptr<Coordinator> coordinator_;  // on rank 0
  std::string description_;

  std::mutex mutex_;
  std::vector<std::unique_ptr<Request>> submitted_;  // guarded by mutex_
  // A calling thread is at the rendezvous or carries a collective out; meanwhile nothing is announced, so no other
  // collective can be decided that would need the group's memory. Guarded by mutex_.
  bool inline_busy_ = false;
  Status inline_failure_;  // guarded by mutex_: what the communication thread has to break with
  uint32_t forks_at_creation_ = 0;
  std::atomic<bool> usable_{true};  // false once broken
  std::atomic<bool> stop_{false};
  std::atomic<double> stop_since_{0};

  // A join has no name, other requests have one.
  static constexpr const char* kJoin = "";
  std::unordered_map<std::string, std::deque<std::unique_ptr<Request>>> pending_;
  size_t num_pending_ = 0;
  std::deque<Verdict> outbox_;  // rank 0: decided, but not yet known to every rank concerned
  bool outbox_front_sent_ = false;
  std::deque<Decision> decisions_;               // to be carried out here
  Status broken_;                                // once not OK, every request fails with it
  std::vector<ControlChannel::Received> early_;  // came in the middle of a collective; see HasLeft
  const Announcement* running_ = nullptr;        // the collective under way
  // The one under way on a calling thread, which owns these: when it asked last whether it is interrupted, and since
  // when it is; 0: never.
  const ddl_request* running_inline_ = nullptr;
  double asked_at_ = 0;
  double interrupted_since_ = 0;
  double last_watch_ = 0;
  double idle_since_ = 0;
  std::thread thread_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_ENGINE_H_
