// Engine: one rank's end of a communicator. A request takes one of three paths:
//
//   inline_path.h        the calling threads of all ranks meet in shared memory and run it themselves
//   planned_queue.h      it has a place in a plan, and all ranks follow the plan's order
//   coordinated_queue.h  any other request: rank 0 decides when all ranks run it
//
// A request on device memory takes one of the last two paths, with a Staging (staging.h).
//
// Each queue has its own communication thread and its own endpoint (endpoint.h: transport, memory, watch over the other
// ranks). A request that cannot take the first two paths falls back to the third.
#ifndef KERAS_DDL_CORE_ENGINE_ENGINE_H_
#define KERAS_DDL_CORE_ENGINE_ENGINE_H_

#include <atomic>
#include <memory>
#include <string>

#include "device/device.h"
#include "engine/communication_thread.h"
#include "engine/coordinated_queue.h"
#include "engine/endpoint.h"
#include "engine/inline_path.h"
#include "engine/planned_queue.h"

namespace ddl {

class Engine {
 public:
  // COLLECTIVE over the ranks of the transport, which the engine owns from then on (also on failure).
  static Status Create(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<Engine>* out);
  ~Engine() { Close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // If it throws, for lack of memory, `done` was not called and will not be. `result_on_host`: see Request.
  void Submit(const ddl_request& request, bool result_on_host = false);
  // Sets this rank's device in the state that all ranks have agreed on, including whether they use its library. Call it
  // once. Any thread.
  void SetDevice(std::shared_ptr<Device> device) { std::atomic_store(&device_, std::move(device)); }
  std::shared_ptr<Device> device() const { return std::atomic_load(&device_); }
  // See ddl_try_run.
  int TryRun(const ddl_request& request, uint32_t patience_us);
  // Adds the queue that follows plans. COLLECTIVE, once; owns the transport as Create does.
  Status AddLane(const ddl_transport& transport, const ddl_options& options);
  // Leaves in an orderly way (see ddl_close). Submit refuses every request from then on.
  void Close();
  // See ddl_wait_for_position_query and ddl_reply_position.
  StackPosition& stack_position() { return coordinated_.queue.stack_position(); }
  void OnPositionKnown() { coordinated_.endpoint->submissions().Ring(); }
  // Whether any request that is not planned has not ended yet. Any thread.
  bool HasOutstanding() { return coordinated_.endpoint->submissions().HasOutstanding(); }

  int rank() const { return coordinated_.endpoint->rank(); }
  int size() const { return coordinated_.endpoint->size(); }
  const std::vector<int>& group() const { return coordinated_.endpoint->group(); }
  int local_rank() const { return coordinated_.endpoint->memory().local_rank(); }
  int local_size() const { return coordinated_.endpoint->memory().local_size(); }
  const char* description() const { return description_.c_str(); }
  ddl_counters counters() const;

 private:
  struct Coordinated {
    explicit Coordinated(std::unique_ptr<Endpoint> endpoint_in)
        : endpoint(std::move(endpoint_in)), queue(*endpoint), inline_path(*endpoint), thread(*endpoint, queue) {}
    const std::unique_ptr<Endpoint> endpoint;
    CoordinatedQueue queue;
    InlinePath inline_path;
    CommunicationThread thread;
  };
  struct Planned {
    Planned(std::unique_ptr<Endpoint> endpoint_in, Submissions& fallback)
        : endpoint(std::move(endpoint_in)), queue(*endpoint, fallback), thread(*endpoint, queue) {}
    const std::unique_ptr<Endpoint> endpoint;
    PlannedQueue queue;
    CommunicationThread thread;
  };

  explicit Engine(std::unique_ptr<Endpoint> endpoint);
  // nullptr: there is no planned queue, or the ranks use the library of their devices: its collectives must start in
  // one order on all ranks, the coordinator's.
  Planned* planned() const;
  void Stage(std::shared_ptr<Device> device, const ddl_request& from, Request* request) const;
  // Whether this process is a forked child of the engine's process, and must not touch memory shared with other ranks.
  bool Forked() const;

  Coordinated coordinated_;
  std::unique_ptr<Planned> planned_;
  std::atomic<Planned*> running_planned_{nullptr};  // planned_ once it runs
  std::shared_ptr<Device> device_;                  // accessed atomically
  std::string description_;
  uint32_t forks_at_creation_ = 0;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_ENGINE_H_
