// Submissions: hands requests from the threads that submit them to the communication thread, and lets one thread at a
// time use the memory of the group: either the communication thread, which takes requests, or one calling thread that
// is inside (inline_path.h).
//
// Why that is enough: a calling thread enters only if no request of its rank is outstanding, and no request is taken
// and announced before it has left. A collective is decided when every rank has announced it. So it is decided either
// before any rank's thread entered (when it was outstanding) or after every rank's thread has left.
#ifndef KERAS_DDL_CORE_ENGINE_SUBMISSIONS_H_
#define KERAS_DDL_CORE_ENGINE_SUBMISSIONS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "shm/group_memory.h"

namespace ddl {

class Submissions {
 public:
  // `memory` must outlive this.
  explicit Submissions(GroupMemory& memory) : memory_(memory) {}

  // Any thread. Hands `request` over and wakes the communication thread; once stopped, fails it instead.
  void Submit(std::unique_ptr<Request> request);
  // Any thread. Hands over a marker (Request::is_marker), which does not count as outstanding. Wakes the communication
  // thread if `wakes` or if something is outstanding.
  void SubmitMarker(std::unique_ptr<Request> marker, bool wakes);
  // Any thread. Wakes the communication thread.
  void Ring();
  // Any thread. Whether a submitted request has not ended yet.
  bool HasOutstanding();

  // Begin and end a calling thread's use of the group's memory. Enter returns false if the thread must not use it.
  // Leave: a `failure` other than OK means that the ranks are out of step, and the communication thread then breaks the
  // communicator.
  bool Enter();
  void Leave(Status failure);

  // The communication thread. Takes the submitted requests, in order, and the failure of a calling thread. False: a
  // calling thread is inside, which rings when it leaves.
  bool Take(std::vector<std::unique_ptr<Request>>* requests, Status* failure);
  // A request that was submitted here has ended, or goes to another queue. Call it before its `done`: the thread that
  // waits for the request may enter at once.
  void CountEnded();
  // Tells the other ranks how many more requests with small data wait in this rank's plan. Any thread.
  void CountSmallPlanned(int change);
  bool IsInside();
  // From now on no calling thread enters.
  void Refuse() { usable_ = false; }

  // From now on requests are refused; the communication thread is woken and ends.
  void Stop();
  bool stopped() const { return stop_; }
  // Seconds since Stop; 0: not stopped.
  double seconds_stopped() const;
  // After Stop, when the communication thread has ended: no other thread touches the group's memory while or after
  // `free` runs.
  void FreeMemory(const std::function<void()>& free);

 private:
  GroupMemory& memory_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Request>> submitted_;  // guarded by mutex_
  bool inside_ = false;                              // guarded by mutex_: a calling thread
  Status failure_;                                   // guarded by mutex_
  std::atomic<bool> usable_{true};
  std::atomic<bool> stop_{false};
  std::atomic<double> stopped_at_{0};
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_SUBMISSIONS_H_
