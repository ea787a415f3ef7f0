// Queue: in which order a communication thread runs what was submitted, the same on all ranks. Two kinds:
// coordinated_queue.h, which asks rank 0, and planned_queue.h, which follows a plan.
//
// All methods run on the communication thread (communication_thread.h) unless they say otherwise.
#ifndef KERAS_DDL_CORE_ENGINE_QUEUE_H_
#define KERAS_DDL_CORE_ENGINE_QUEUE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "engine/endpoint.h"
#include "engine/request.h"

namespace ddl {

class Queue {
 public:
  explicit Queue(Endpoint& endpoint);
  virtual ~Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Takes over what was submitted. False: nothing, or a calling thread is inside.
  bool TakeSubmissions();
  // Acts on the messages that have arrived. False: none has.
  bool TakeMessages();
  // Runs what can be run, without waiting for a rank that is not ready. False: nothing was done.
  virtual bool Progress() = 0;
  // Several times a second: checks on the other ranks, deadlines, and who must be warned. False: nothing was done.
  bool Check();
  // Leaves in an orderly way: fails what is pending, and tells the others. The last call.
  void Leave();

  // Whether anything was taken and has not ended.
  virtual bool AnyPending() const = 0;
  // Whether something is usually a microsecond away.
  virtual bool ExpectsSoon() const = 0;
  // How long the thread may sleep unless its bell rings, in microseconds. `idle_s`: for how long it had nothing to do.
  virtual int64_t SleepUs(double idle_s) const = 0;

 protected:
  virtual void Add(std::unique_ptr<Request> request) = 0;
  virtual void Handle(int peer, const std::string& bytes) = 0;
  // REQUIRES: the communicator is not broken. May break it.
  virtual bool CheckUnbroken() = 0;
  // Fails everything pending.
  virtual void Fail(const Status& status) = 0;
  // What this rank has promised to run and has not, in words; "" for nothing.
  virtual std::string Promised() const = 0;
  // Sends what other ranks must still get from this one, which leaves and is not broken.
  virtual void SendLast() {}
  // Cancels messages in flight that are not the endpoint's.
  virtual void Cancel() {}
  // Ends a request that was submitted here.
  virtual void Finish(const Request& request, const Status& status);

  // Breaks the communicator if a rank is lost; false then.
  bool CheckHealth();
  // The status for a request that could not run: `status`, with the request named in the message.
  static Status WithPendingRequest(const Status& status, const Announcement& announcement);
  // For messages that ring no bell: rarer the longer nothing happens.
  static int64_t PollUs(double idle_s);

  Endpoint& endpoint_;
  Submissions& submissions_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_QUEUE_H_
