// Endpoint: one rank's end of a communicator: its transport and shared memory, the failure detection, and collectives
// over them, one at a time. queue.h decides their order.
//
// Used by one communication thread, which owns the transport, and by a calling thread while it is inside
// (submissions.h). Methods that other threads may call are marked.
#ifndef KERAS_DDL_CORE_ENGINE_ENDPOINT_H_
#define KERAS_DDL_CORE_ENGINE_ENDPOINT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/waiter.h"
#include "control/channel.h"
#include "control/message.h"
#include "engine/executor.h"
#include "engine/request.h"
#include "engine/submissions.h"
#include "hierarchy/hierarchical_collectives.h"
#include "liveness/heartbeat.h"
#include "liveness/peer_watch.h"
#include "liveness/rank_locations.h"
#include "shm/group_memory.h"

namespace ddl {

class Endpoint {
 public:
  // COLLECTIVE over the ranks of the transport, which the endpoint owns from then on (also on failure).
  static Status Create(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<Endpoint>* out);
  ~Endpoint() { Close(); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Destroys the transport, once. REQUIRES: Drain, if anything was sent.
  void Close();

  int rank() const { return transport_.rank; }
  int size() const { return transport_.size; }
  const ddl_transport& transport() const { return transport_; }
  const std::vector<int>& group() const { return group_; }
  double deadline_s() const { return deadline_s_; }
  double warn_after_s() const { return warn_after_s_; }
  std::string Describe() const;
  GroupMemory& memory() { return *memory_; }
  const GroupMemory& memory() const { return *memory_; }
  const RankLocations& locations() const { return locations_; }
  Submissions& submissions() { return submissions_; }
  ControlChannel& channel() { return channel_; }
  const ControlChannel& channel() const { return channel_; }
  HierarchicalCollectives& collectives() { return collectives_; }
  Executor& executor() { return executor_; }
  // Times to poll before the first sched_yield.
  int spins() const { return waiter_.spins(); }

  // Marks the calling thread as a communication thread, for Health and warnings. Once per thread.
  static void EnterCommunicationThread();

  // COLLECTIVE. Runs a request, or if this rank has joined, its part in another rank's request. Returns its status. If
  // the ranks fall out of step, the communicator breaks.
  Status Run(const Request& request, const Decision& decision);
  Status RunJoined(const Decision& decision);

  // Calls `handle` with each control message that has arrived, except aborts, which it handles itself. Returns whether
  // any has arrived.
  bool TakeMessages(const std::function<void(int peer, const std::string& bytes)>& handle);
  // Rank `rank` has announced that it leaves.
  void MarkLeft(int rank) { left_[static_cast<size_t>(rank)] = true; }
  bool left(int rank) const { return left_[static_cast<size_t>(rank)]; }

  // endpoint_health.cc. Not OK: a rank is lost, or the communicator is broken or stopped. Call it many times a second,
  // also while a collective runs, because it shows the other ranks that this rank is alive. On a calling thread it
  // returns the `health` of OnCallingThread.
  Status Health();
  // Like Health, but checks only the other ranks of this host. On the communication thread.
  Status CheckPeers() { return peer_watch_.Check(); }
  // While a calling thread is inside, it waits with this `health`, and warnings name its collective by `running`.
  void OnCallingThread(std::function<Status()> health, std::function<std::string()> running);
  // DDL_NOT_FOUND when this communicator was stopped a while ago and a collective still runs. Any thread.
  Status CheckStopped() const;

  // If not OK, every request fails with this status.
  const Status& broken() const { return broken_; }
  // Breaks the communicator on all ranks: notifies them, and calls the function of OnBroken. Only the first call acts.
  void Break(const Status& status);
  // Breaks the communicator on this rank only, without calling the function of OnBroken.
  void SetBroken(const Status& status) { broken_ = status; }
  void OnBroken(std::function<void(const Status&)> fail) { on_broken_ = std::move(fail); }
  // Shows the ranks of the group, and a calling thread, that this rank has broken, and why. Only the first call counts,
  // because they may read the reason at any time from then on.
  void PublishBroken(const Status& status);
  void PublishLeft();

  void Warn(const std::string& message) const;
  // Whether this rank is the one that warns for all of its group that wait: usually the lowest.
  bool WarnsForGroup(double seconds);
  // Describes the ranks that show no sign of life, for messages; "" for none. `ranks`: also receives them; may be NULL.
  std::string DescribeSuspects(FailedRanks* ranks = nullptr) const;
  // Returns `status`, and adds DescribeSuspects if a collective made no progress.
  Status WithSuspects(const Status& status) const;
  // " It fails after 300 s."; "" without a deadline.
  std::string DescribeDeadline() const;

  // Sends queued messages for a while, then cancels messages in flight. Required before Close.
  void Drain();

 private:
  Endpoint(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<GroupMemory> memory,
           RankLocations locations, const std::vector<int>& group);
  bool HasLeft(int rank);
  // Returns the status for the other ranks: for them, a rank that was stopped is lost.
  Status ForOthers(const Status& status) const;
  double WarnStalled(const std::string& waits_for, double seconds);
  template <typename Execute>
  Status RunAs(const Announcement& announcement, Execute execute);

  const ddl_transport transport_;
  const std::vector<int> group_;
  const double deadline_s_;
  const double warn_after_s_;
  void (*const warn_)(void* user, const char* message);
  void* const warn_user_;
  std::unique_ptr<GroupMemory> memory_;
  const RankLocations locations_;
  Submissions submissions_;
  PeerWatch peer_watch_;
  ControlChannel channel_;
  Heartbeat heartbeat_;
  Waiter waiter_;
  HierarchicalCollectives collectives_;
  Executor executor_;
  Status broken_;
  std::function<void(const Status&)> on_broken_ = [](const Status&) {};
  std::function<Status()> health_of_caller_ = [] { return Status(); };
  std::function<std::string()> running_of_caller_ = [] { return std::string(); };
  std::vector<bool> left_;                                   // by rank
  std::vector<ControlChannel::Received> deferred_messages_;  // arrived during a collective; see HasLeft
  const Announcement* running_ = nullptr;                    // the collective under way
  bool closed_ = false;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_ENDPOINT_H_
