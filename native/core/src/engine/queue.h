// Queue: decides in which order a communication thread runs requests, which is the same on all ranks. There are two
// kinds: coordinated_queue.h asks rank 0, and planned_queue.h follows a plan.
//
// All methods run on the communication thread (communication_thread.h) unless a comment names other threads.
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

  // Takes new requests. False: there are none, or a calling thread is inside.
  bool TakeSubmissions();
  // Acts on the messages that have arrived. False: none has arrived.
  bool TakeMessages();
  // Runs requests that can run, without waiting for a rank that is not ready. False: nothing was done.
  virtual bool Progress() = 0;
  // Call it several times a second. It checks whether the other ranks are alive, checks deadlines, and warns. It may
  // break the communicator.
  void Check();
  // Leaves in an orderly way: fails pending requests, and notifies the other ranks. The last call.
  void Leave();

  // Whether any request was taken and has not ended.
  virtual bool AnyPending() const = 0;
  // Whether there is usually something to do within microseconds, so that spinning is worth it.
  virtual bool ExpectsSoon() const = 0;
  // How long the thread may sleep unless its bell rings, in microseconds. `idle_s`: for how long it had nothing to do.
  virtual int64_t SleepUs(double idle_s) const = 0;

 protected:
  virtual void Add(std::unique_ptr<Request> request) = 0;
  virtual void Handle(int peer, const std::string& bytes) = 0;
  // The queue's part of Check. REQUIRES: the communicator is not broken.
  virtual void CheckDeadlines() = 0;
  // Fails everything pending.
  virtual void Fail(const Status& status) = 0;
  // A collective that this rank has announced or posted and has not run, for people; "" for none.
  virtual std::string DescribePromised() const = 0;
  // Before leaving an unbroken communicator: sends what other ranks still need from this one.
  virtual void SendLast() {}
  // Cancels messages in flight other than the endpoint's.
  virtual void Cancel() {}
  // Ends a request that was submitted here.
  virtual void Finish(const Request& request, const Status& status);

  // Breaks the communicator if a rank is lost; false then.
  bool CheckHealth();
  // The status for a request that could not run: `status`, with the request named in the message.
  static Status WithPendingRequest(const Status& status, const Announcement& announcement);
  // The sleep between two polls for messages that ring no bell. It grows while nothing happens.
  static int64_t PollUs(double idle_s);

  Endpoint& endpoint_;
  Submissions& submissions_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_QUEUE_H_
