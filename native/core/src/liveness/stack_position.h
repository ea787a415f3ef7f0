// StackPosition: passes the query "where is your main thread?" to a thread that can tell (Python), and its reply back.
//
// The communication thread never runs Python: a main thread that holds the interpreter lock would stop all
// communication. So a Python thread waits in WaitForQuery. It may take any time to reply, or never reply.
#ifndef KERAS_DDL_CORE_LIVENESS_STACK_POSITION_H_
#define KERAS_DDL_CORE_LIVENESS_STACK_POSITION_H_

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "common/wait.h"

namespace ddl {

class StackPosition {
 public:
  // Waits for a query; false: closed, and no query will come. Any thread.
  bool WaitForQuery() {
    std::unique_lock<std::mutex> lock(mutex_);
    has_listener_ = true;
    Wait(changed_, lock, [this] { return asked_ || closed_; });
    asked_ = false;
    return !closed_;
  }
  void Reply(std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reply_ = std::move(text);
    replied_ = true;
  }
  void Close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  // The communication thread's side; neither blocks. Query: false if no thread has ever waited for queries. TakeReply:
  // false if there is no new reply.
  bool Query() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!has_listener_) return false;
    replied_ = false;
    asked_ = true;
    changed_.notify_all();
    return true;
  }
  bool TakeReply(std::string* reply) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!replied_) return false;
    replied_ = false;
    *reply = std::move(reply_);
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_listener_ = false;
  bool asked_ = false;
  bool replied_ = false;
  bool closed_ = false;
  std::string reply_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_LIVENESS_STACK_POSITION_H_
