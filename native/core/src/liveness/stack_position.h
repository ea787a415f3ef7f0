// StackPosition: hands the question "where is your main thread?" to whoever can look (Python), and its answer back.
//
// The communication thread never runs Python: a main thread that keeps the interpreter's lock would stop all
// communication. So a thread of the language above waits in Next, and may take any time, or for ever, to answer.
#ifndef KERAS_DDL_CORE_LIVENESS_STACK_POSITION_H_
#define KERAS_DDL_CORE_LIVENESS_STACK_POSITION_H_

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

namespace ddl {

class StackPosition {
 public:
  // Waits for a question; false: closed, and no question will come. Any thread.
  bool Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    attended_ = true;
    changed_.wait(lock, [this] { return asked_ || closed_; });
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

  // The communication thread's side; neither blocks. False: nobody ever waited for questions.
  bool Ask() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!attended_) return false;
    answered_ = false;
    asked_ = true;
    changed_.notify_all();
    return true;
  }
  bool Take(std::string* answer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!answered_) return false;
    answered_ = false;
    *answer = std::move(answer_);
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool attended_ = false;
  bool asked_ = false;
  bool answered_ = false;
  bool closed_ = false;
  std::string answer_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_LIVENESS_STACK_POSITION_H_
