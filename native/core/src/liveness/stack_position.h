// StackPosition: passes the query "where is your main thread?" to a thread that can tell (Python), and its answer back.
//
// The communication thread never runs Python: a main thread that holds the interpreter lock would stop all
// communication. So a Python thread waits in WaitForQuery. It may take any time to answer, or never answer.
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
  void Answer(std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    answer_ = std::move(text);
    answered_ = true;
  }
  void Close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  // The communication thread's side; neither blocks. Query: false if no thread has ever waited for queries. TakeAnswer:
  // false if there is no new answer.
  bool Query() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!has_listener_) return false;
    answered_ = false;
    asked_ = true;
    changed_.notify_all();
    return true;
  }
  bool TakeAnswer(std::string* answer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!answered_) return false;
    answered_ = false;
    *answer = std::move(answer_);
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_listener_ = false;
  bool asked_ = false;
  bool answered_ = false;
  bool closed_ = false;
  std::string answer_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_LIVENESS_STACK_POSITION_H_
