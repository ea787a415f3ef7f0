// CommunicationThread: the thread on which a queue runs.
#ifndef KERAS_DDL_CORE_ENGINE_COMMUNICATION_THREAD_H_
#define KERAS_DDL_CORE_ENGINE_COMMUNICATION_THREAD_H_

#include <cstdint>
#include <thread>

#include "base/status.h"
#include "engine/endpoint.h"
#include "engine/queue.h"

namespace ddl {

class CommunicationThread {
 public:
  // `queue` belongs to `endpoint`; both must outlive this.
  CommunicationThread(Endpoint& endpoint, Queue& queue) : endpoint_(endpoint), queue_(queue) {}
  ~CommunicationThread() { Close(); }
  CommunicationThread(const CommunicationThread&) = delete;
  CommunicationThread& operator=(const CommunicationThread&) = delete;

  // Starts it on every rank or on none. COLLECTIVE.
  Status Start();
  // Stops the submissions, lets the queue leave, ends the thread, and closes the endpoint. Closing again changes
  // nothing. Only one other thread may call it.
  void Close();

 private:
  void Loop();
  void Idle(uint32_t seen);

  Endpoint& endpoint_;
  Queue& queue_;
  double last_check_ = 0;
  double idle_since_ = 0;
  std::thread thread_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_COMMUNICATION_THREAD_H_
