#include "engine/communication_thread.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "base/gather.h"
#include "base/guard.h"
#include "base/waiter.h"
#include "engine/scheduling.h"
#include "shm/doorbell.h"
#include "shm/life_lock.h"

namespace ddl {
namespace {

// Seconds between checks of waiting requests, other processes and deadlines.
constexpr double kCheckPendingSeconds = 0.02;
constexpr double kCheckIdleSeconds = 0.1;
// How long the thread spins before it sleeps, because work usually arrives within a microsecond.
constexpr double kSpinSeconds = 20e-6;

}  // namespace

Status CommunicationThread::Start() {
  const RankLocations& locations = endpoint_.locations();
  int32_t error = 0;
  std::promise<bool> go;
  try {
    thread_ = std::thread([this, start = go.get_future()]() mutable {
      // A broken promise counts as false: Start has thrown after the try block, for lack of memory.
      if (GuardMemory([&] { return start.get(); }, [](const std::exception&) { return false; })) Loop();
    });
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  } catch (const std::bad_alloc&) {
    error = ENOMEM;
  }
  std::vector<int32_t> errors;
  Status status = Gather(endpoint_.transport(), error, &errors);
  std::vector<int> without;
  for (int rank = 0; status.ok() && rank < endpoint_.size(); ++rank) {
    if (errors[static_cast<size_t>(rank)] == 0) continue;
    without.push_back(rank);
    error = errors[static_cast<size_t>(rank)];
  }
  if (!without.empty()) {
    status = {DDL_INTERNAL, "the communication thread could not be started on " + locations.Describe(without) + ": " +
                                std::strerror(error) +
                                ". Raise the number of threads that the user (ulimit -u) or the container (pids.max) "
                                "may have, or start fewer ranks there."};
  }
  if (!thread_.joinable()) return status;
  go.set_value(status.ok());
  if (!status.ok()) thread_.join();
  return status;
}

void CommunicationThread::Close() {
  if (!thread_.joinable()) return;
  endpoint_.submissions().Stop();
  thread_.join();
  endpoint_.Close();
}

void CommunicationThread::Loop() {
  Endpoint::EnterCommunicationThread();
  pthread_setname_np(pthread_self(), "keras_ddl");
  RequestLowWakeupLatency();
  const std::vector<int> sharers = endpoint_.locations().RanksOnSameCores(endpoint_.rank());
  KeepToOwnCores(static_cast<int>(std::find(sharers.begin(), sharers.end(), endpoint_.rank()) - sharers.begin()),
                 static_cast<int>(sharers.size()));
  prctl(PR_SET_TIMERSLACK, 1000UL);  // sleeps of 20 us and more must be precise (the default slack is 50 us)
  RankBlock& own = endpoint_.memory().own();
  const LifeLock alive(own);
  while (!endpoint_.submissions().stopped()) {
    // Read before looking for work, because later arrivals change it and make Idle return at once.
    const uint32_t seen = BellCount(own);
    bool worked = queue_.TakeSubmissions();
    worked = queue_.TakeMessages() || worked;
    const double now = Now();
    if (now - last_check_ > (queue_.AnyPending() ? kCheckPendingSeconds : kCheckIdleSeconds)) {
      last_check_ = now;
      queue_.Check();
    }
    worked = queue_.Progress() || worked;  // after Check, which may have decided something
    if (worked) {
      idle_since_ = 0;
    } else {
      Idle(seen);
    }
  }
  queue_.Leave();
}

void CommunicationThread::Idle(uint32_t seen) {
  const double now = Now();
  if (idle_since_ == 0) idle_since_ = now;
  if (queue_.ExpectsSoon() && now - idle_since_ < kSpinSeconds) {
    for (int i = 0; i < 50; ++i) CpuRelax();
    return;
  }
  SleepUntilRung(endpoint_.memory().own(), seen, queue_.SleepUs(now - idle_since_));
}

}  // namespace ddl
