#include "engine/submissions.h"

#include <utility>

#include "base/failure.h"
#include "base/waiter.h"
#include "engine/engine_block.h"
#include "shm/doorbell.h"

namespace ddl {

void Submissions::Submit(std::unique_ptr<Request> request) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stop_) {
      submitted_.push_back(std::move(request));
      OwnBlock(memory_).outstanding.fetch_add(1, std::memory_order_relaxed);
      RingBell(memory_.own());
    }
  }
  if (request != nullptr) {
    const Status closed(DDL_NOT_FOUND, "the communicator has been shut down");
    CallDone(request->done, request->user, request->announcement.name.c_str(), closed);
  }
}

void Submissions::SubmitMarker(std::unique_ptr<Request> marker, bool wakes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) return;
  submitted_.push_back(std::move(marker));
  if (wakes || OwnBlock(memory_).outstanding.load(std::memory_order_relaxed) > 0) RingBell(memory_.own());
}

void Submissions::Ring() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stop_) RingBell(memory_.own());
}

bool Submissions::HasOutstanding() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !stop_ && OwnBlock(memory_).outstanding.load(std::memory_order_acquire) != 0;
}

bool Submissions::Enter() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stop_ || inside_ || !usable_) return false;
  // Synchronizes with what the communication thread did for requests that have ended.
  if (OwnBlock(memory_).outstanding.load(std::memory_order_acquire) != 0) return false;
  if (BlockOf(memory_, 0).no_rendezvous.load(std::memory_order_relaxed) != 0) return false;
  inside_ = true;
  return true;
}

void Submissions::Leave(Status failure) {
  // Rings under the lock: afterwards FreeMemory may run.
  const std::lock_guard<std::mutex> lock(mutex_);
  inside_ = false;
  if (!failure.ok() || !submitted_.empty() || stop_) RingBell(memory_.own());
  if (failure.ok()) return;
  usable_ = false;
  failure_ = std::move(failure);
}

bool Submissions::Take(std::vector<std::unique_ptr<Request>>* requests, Status* failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (inside_) return false;
  *failure = std::exchange(failure_, {});
  requests->swap(submitted_);
  return true;
}

void Submissions::CountEnded() { OwnBlock(memory_).outstanding.fetch_sub(1, std::memory_order_release); }

void Submissions::CountSmallPlanned(int change) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stop_) OwnBlock(memory_).small_planned.fetch_add(static_cast<uint32_t>(change), std::memory_order_relaxed);
}

bool Submissions::IsInside() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return inside_;
}

void Submissions::Stop() {
  stopped_at_ = Now();
  stop_ = true;
  RingBell(memory_.own());
}

double Submissions::seconds_stopped() const { return stop_ ? Now() - stopped_at_ : 0; }

void Submissions::FreeMemory(const std::function<void()>& free) {
  // Other threads touch the group's memory only under the lock, and no longer once they have seen `stop_`.
  const std::lock_guard<std::mutex> lock(mutex_);
  free();
}

}  // namespace ddl
