// Engine: one rank's end of a communicator. Any thread submits; one communication thread announces, receives decisions
// and runs the collectives, in the order that the coordinator (in rank 0's engine) decided. Where all ranks share
// memory, calling threads that reach a collective together run it themselves (inline_rendezvous.h).
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
#include "engine/plan_lane.h"
#include "hierarchy/hierarchical_collectives.h"
#include "liveness/heartbeat.h"
#include "liveness/peer_watch.h"
#include "liveness/rank_locations.h"
#include "liveness/stack_position.h"
#include "shm/group_memory.h"

namespace ddl {

class Engine {
 public:
  // COLLECTIVE over the ranks of the transport, which the engine owns from then on (also on failure).
  // `serves`: the engine whose lane this is (ddl_add_lane), which outlives it; nullptr: a communicator of its own.
  static Status Create(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<Engine>* out,
                       Engine* serves = nullptr);
  ~Engine() { Close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void Submit(const ddl_request& request);
  // planned.cc. COLLECTIVE, once.
  Status AddLane(const ddl_transport& transport, const ddl_options& options);
  // Leaves in an orderly way; see ddl_close. Submit refuses everything from then on.
  void Close();
  // See ddl_wait_for_position_query and ddl_reply_position.
  StackPosition& stack_position() { return stack_position_; }
  void OnPositionKnown();
  // Whether any request has not ended yet. Any thread.
  bool HasOutstanding();
  // inline.cc. Runs the request on the calling thread, waiting about `patience_us` for the other ranks to do the same.
  // Returns what ddl_try_run does; 0 also when the communicator broke, which Submit then reports.
  int TryRun(const ddl_request& request, uint32_t patience_us);

  int rank() const { return transport_.rank; }
  int size() const { return transport_.size; }
  int local_rank() const { return memory_->local_rank(); }
  int local_size() const { return memory_->local_size(); }
  const char* description() const { return description_.c_str(); }
  ddl_counters counters() const;

 private:
  Engine(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<GroupMemory> memory,
         RankLocations locations, const std::vector<int>& group, Engine* serves);
  void SubmitOwned(std::unique_ptr<Request> request);

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
  // DDL_ABORTED when the caller was interrupted a while ago and the collective has not ended.
  Status CheckInterrupted();
  bool IsInlineBusy();
  // Whether this is a forked child of the process that made this: it must not touch memory shared with other ranks.
  bool Forked() const;
  static bool OnCommunicationThread();

  // All below run on the communication thread.
  void Loop();
  bool TakeSubmissions();
  bool RunDecisions();
  void Decide(const Decision& decision);
  // Called before and after the executor runs. After EndRun the communicator may be broken; returns the status for the
  // request.
  void BeginRun(const Announcement& announcement);
  Status EndRun(const Status& status, bool broken);
  void Finish(const Request& request, const Status& status);
  void Idle(uint32_t seen);
  void Warn(const std::string& message) const;

  // join.cc. Whether this rank waits in a join: it takes part in the collectives of others, and submits none.
  bool AnyPending() const { return num_pending_ > 0 || (lane_ != nullptr && !lane_->runs().empty()); }
  bool HasJoined() const { return pending_.count(kJoin) != 0; }
  void RunAsJoined(const Decision& decision);
  void EndJoin(const Decision& decision);

  // planned.cc. Of an engine that is a lane: what TryRun of the other one has run; whether small data waits here, which
  // a rendezvous must not overtake; and the part of the communication thread.
  void Skip(const PlanPlace& place);
  bool HasSmall() const { return num_small_.load(std::memory_order_relaxed) > 0; }
  // When a rank fails: see PlanLane::Hurry and Resume.
  void HurryLane();
  void ResumeLane();
  bool RunPlanned();
  void CheckLane();
  // Some rank has left: the coordinator has what is planned from now on.
  void CloseLane(const std::string& why);

  // messages.cc.
  void Announce(std::unique_ptr<Request> request);
  bool TakeMessages();
  void Handle(int peer, const std::string& bytes);
  bool DeliverVerdicts();
  // Sends what the first of the outbox decides, once, to the ranks that are still there.
  void SendVerdict();
  // Rank 0 has left, and all that it decided before is done.
  void FailWithoutCoordinator();

  // failure.cc.
  void CheckPeers();
  void ExchangePositions();
  void ReportPosition();
  bool HasLeft(int rank);
  // One rank of a group warns for all that wait: usually the lowest. Whether it is this one.
  bool WarnsForGroup(double seconds);
  double WarnStalled(const std::string& waits_for, double seconds);
  std::string DescribeSuspects() const;
  // Adds the ranks that show no sign of life to the message of a collective that made no progress.
  Status WithSuspects(const Status& status) const;
  void SendToCoordinator(MessageType type, const std::string& text);
  Status Health();
  void Break(const Status& status);
  void PublishBroken(const Status& status);
  void FailPending(const Status& status);
  // The status for a request that could not run: `status`, with the request named in the message.
  static Status WithPendingRequest(const Status& status, const Announcement& announcement);
  void Leave();

  ddl_transport transport_;
  const double deadline_s_;
  const double warn_after_s_;
  void (*const warn_)(void* user, const char* message);
  void* const warn_user_;
  std::unique_ptr<GroupMemory> memory_;
  const RankLocations locations_;
  StackPosition stack_position_;
  PeerWatch peer_watch_;
  ControlChannel channel_;
  Heartbeat heartbeat_;
  Waiter waiter_;
  HierarchicalCollectives collectives_;
  Executor executor_;
  InlineRendezvous rendezvous_;
  std::vector<const void*> sources_;              // scratch of RunInline
  std::unique_ptr<Coordinator> coordinator_;      // on rank 0
  KnownCollectives known_;                        // on the others, of the communication thread
  Engine* const serves_;                          // of a lane: who it is for
  std::unique_ptr<PlanLane> lane_;                // of a lane
  std::unique_ptr<Engine> own_lane_;              // of one that has a lane
  std::atomic<Engine*> planned_engine_{nullptr};  // the same, once it runs
  std::atomic<bool> hurries_{false};              // of a lane: whether a rank has failed
  std::atomic<int> num_small_{0};                 // requests here whose data could go through a rendezvous
  double warn_lane_after_ = 0;
  std::string description_;

  std::mutex mutex_;
  std::vector<std::unique_ptr<Request>> submitted_;  // guarded by mutex_
  // A calling thread is at the rendezvous or runs a collective. Meanwhile nothing is announced, so no other collective
  // that needs the group's memory can be decided. Guarded by mutex_.
  bool inline_busy_ = false;
  Status
      inline_failure_;  // guarded by mutex_: the status with which the communication thread must break the communicator
  uint32_t forks_at_creation_ = 0;
  std::atomic<bool> usable_{true};  // false once broken
  std::atomic<bool> stop_{false};
  std::atomic<double> stop_since_{0};
  std::atomic<uint64_t> coordinated_{0};  // see ddl_counters
  std::atomic<uint64_t> inline_{0};
  std::atomic<uint64_t> planned_{0};
  std::atomic<uint64_t> demoted_{0};

  // A join has no name; other requests have one.
  static constexpr const char* kJoin = "";
  std::unordered_map<std::string, std::deque<std::unique_ptr<Request>>> pending_;
  size_t num_pending_ = 0;
  std::deque<Verdict> outbox_;  // rank 0: decided, but not yet known to every rank concerned
  bool outbox_front_sent_ = false;
  std::deque<Decision> decisions_;  // to be executed here
  bool coordinator_left_ = false;
  std::string leave_reason_;                                 // its words
  Status broken_;                                            // once not OK, every request fails with it
  std::vector<ControlChannel::Received> deferred_messages_;  // arrived during a collective; see HasLeft
  const Announcement* running_ = nullptr;                    // the collective under way
  // The request running on a calling thread, which owns these: when it last checked for an interrupt, and when one was
  // found; 0: never.
  const ddl_request* running_inline_ = nullptr;
  double interrupt_checked_at_ = 0;
  double interrupted_since_ = 0;
  double last_peer_check_ = 0;
  double idle_since_ = 0;
  std::thread thread_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_ENGINE_H_
