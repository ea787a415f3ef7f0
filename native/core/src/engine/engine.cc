#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <future>
#include <system_error>
#include <utility>

#include "base/gather.h"
#include "base/trace.h"
#include "engine/scheduling.h"
#include "hierarchy/layout.h"
#include "shm/doorbell.h"
#include "shm/life_lock.h"

namespace ddl {
namespace {

// How often waiting requests, other processes and deadlines are checked.
constexpr double kCheckPendingSeconds = 0.02;
constexpr double kCheckIdleSeconds = 0.1;
// How long ranks wait for one that has nothing to run by plan.
constexpr double kPlanPatienceSeconds = 2.0;
// How long a thread spins for an answer that is usually a microsecond away.
constexpr double kSpinSeconds = 20e-6;

thread_local bool on_communication_thread = false;

// How many forks separate this process from the one that loaded the library: a child has the memory, but no
// communication thread.
std::atomic<uint32_t> forks{0};

}  // namespace

Status Engine::Create(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<Engine>* out,
                      Engine* serves) {
  Status status = AgreeOnLayout(transport, options);
  if (!status.ok()) {
    transport.destroy(transport.self);
    return status;
  }
  const std::vector<int> group(options.group, options.group + transport.size);
  std::unique_ptr<GroupMemory> memory;
  status = GroupMemory::Create(transport, group, SlotBytes(options, transport.size), &memory);
  if (status.ok()) status = PeerMemory::Probe(transport, options.staged_only == 0, *memory);
  RankLocations locations;
  if (status.ok()) status = RankLocations::Exchange(transport, &locations);
  if (!status.ok()) {
    transport.destroy(transport.self);
    return status;
  }
  std::unique_ptr<Engine> engine(
      new Engine(transport, options, std::move(memory), std::move(locations), group, serves));
  status = engine->Start();
  if (status.ok()) {
    *out = std::move(engine);
  } else {
    engine.reset();
    transport.destroy(transport.self);
  }
  return status;
}

Engine::Engine(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<GroupMemory> memory,
               RankLocations locations, const std::vector<int>& group, Engine* serves)
    : transport_(transport),
      deadline_s_(options.deadline_s),
      warn_after_s_(options.warn_after_s),
      warn_(options.warn),
      warn_user_(options.warn_user),
      memory_(std::move(memory)),
      locations_(std::move(locations)),
      peer_watch_(*memory_, locations_, transport.rank, [this](int rank) { return HasLeft(rank); }),
      channel_(transport_, *memory_),
      heartbeat_(transport_, *memory_, locations_, group, options.lost_after_s,
                 [this](int rank) { return HasLeft(rank); }),
      waiter_([this] { return Health(); }, options.deadline_s, memory_->local_size()),
      collectives_(transport_, *memory_, waiter_, group,
                   std::vector<int>(options.outer, options.outer + options.num_outer)),
      executor_(transport_, collectives_, options.feedback_bytes),
      rendezvous_(*memory_),
      sources_(static_cast<size_t>(transport.size)),
      serves_(serves) {
  static const int watching = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  (void)watching;
  forks_at_creation_ = forks;
  if (transport.rank == 0) {
    coordinator_ = std::make_unique<Coordinator>(locations_, options.warn_after_s, options.deadline_s);
  }
  if (serves != nullptr) {
    double patience_s = kPlanPatienceSeconds;
    for (const double limit : {options.warn_after_s, options.deadline_s}) {
      if (limit > 0) patience_s = std::min(patience_s, limit / 4);
    }
    lane_ =
        std::make_unique<PlanLane>(transport_, *memory_, group, patience_s, [this](std::unique_ptr<Request> request) {
          demoted_.fetch_add(1, std::memory_order_relaxed);
          const bool small = request->small;
          OwnBlock(*memory_).outstanding.fetch_sub(1, std::memory_order_release);
          serves_->SubmitOwned(std::move(request));
          if (small) num_small_.fetch_sub(1, std::memory_order_relaxed);
        });
  }
  if (options.warn_after_s > 0) {
    waiter_.SetWarning(options.warn_after_s, [this](const std::string& waits_for, double seconds) {
      return WarnStalled(waits_for, seconds);
    });
  }
  description_ = collectives_.Describe() + "; " + memory_->kind() + ", " +
                 std::to_string(memory_->slot_bytes() / 1024) + " KiB slots" +
                 (memory_->reachable() ? ", cross memory attach; " : "; ") + InstructionSetName();
}

Status Engine::Start() {
  int32_t error = 0;
  std::promise<bool> go;
  try {
    thread_ = std::thread([this, start = go.get_future()]() mutable {
      if (start.get()) Loop();
    });
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  }
  std::vector<int32_t> errors;
  Status status = Gather(transport_, error, &errors);
  std::vector<int> without;
  for (int rank = 0; status.ok() && rank < transport_.size; ++rank) {
    if (errors[static_cast<size_t>(rank)] == 0) continue;
    without.push_back(rank);
    error = errors[static_cast<size_t>(rank)];
  }
  if (!without.empty()) {
    status = {DDL_INTERNAL, "the communication thread could not be started on " + locations_.Describe(without) + ": " +
                                std::strerror(error) +
                                ". Raise the number of threads that the user (ulimit -u) or the container (pids.max) "
                                "may have, or start fewer ranks there."};
  }
  if (!thread_.joinable()) return status;
  go.set_value(status.ok());
  if (!status.ok()) thread_.join();
  return status;
}

void Engine::Close() {
  if (own_lane_ != nullptr) own_lane_->Close();
  if (!thread_.joinable()) return;
  stack_position_.Close();
  stop_since_ = Now();
  stop_ = true;
  RingBell(memory_->own());
  thread_.join();
  // Other threads touch the group's memory only under the lock, and no longer once they have seen `stop_`.
  const std::lock_guard<std::mutex> lock(mutex_);
  transport_.destroy(transport_.self);
}

void Engine::Submit(const ddl_request& from) {
  const Status status = Validate(from, transport_.size);
  if (!status.ok()) {
    from.done(from.user, status.code(), status.message().c_str());
    return;
  }
  // Before the lock, which a thread of the parent may have held when this process was forked: nobody would release it.
  if (Forked()) {
    from.done(from.user, DDL_FAILED_PRECONDITION, "this process was forked from a rank, and is not a rank itself");
    return;
  }
  auto request = std::make_unique<Request>();
  request->Describe(from, transport_.size);
  request->submitted = Now();
  if ((from.flags & DDL_FLAG_CANCELS) != 0) HurryLane();
  Engine* const lane = from.plan_size > 0 ? planned_engine_.load(std::memory_order_acquire) : nullptr;
  if (lane == nullptr) {
    SubmitOwned(std::move(request));
    return;
  }
  request->small = BytesOf(from) <= kEagerBytes;
  if (request->small) lane->num_small_.fetch_add(1, std::memory_order_relaxed);
  lane->SubmitOwned(std::move(request));
}

void Engine::SubmitOwned(std::unique_ptr<Request> request) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stop_) {
      submitted_.push_back(std::move(request));
      OwnBlock(*memory_).outstanding.fetch_add(1, std::memory_order_relaxed);
      RingBell(memory_->own());
    }
  }
  if (request != nullptr) {
    request->done(request->user, DDL_FAILED_PRECONDITION, "the communicator has been shut down");
  }
}

bool Engine::Forked() const { return forks.load(std::memory_order_relaxed) != forks_at_creation_; }

void Engine::Loop() {
  on_communication_thread = true;
  pthread_setname_np(pthread_self(), "keras_ddl");
  RequestLowWakeupLatency();
  const std::vector<int> sharers = locations_.RanksOnSameCores(transport_.rank);
  KeepToOwnCores(static_cast<int>(std::find(sharers.begin(), sharers.end(), transport_.rank) - sharers.begin()),
                 static_cast<int>(sharers.size()));
  prctl(PR_SET_TIMERSLACK, 1000UL);  // sleeps of 50 us must be precise (the default slack is 50 us)
  const LifeLock alive(memory_->own());
  while (!stop_) {
    // Read before looking for work: what arrives later changes it, and Idle returns at once.
    const uint32_t seen = BellCount(memory_->own());
    bool worked = TakeSubmissions();
    worked = TakeMessages() || worked;
    worked = DeliverVerdicts() || worked;
    worked = RunDecisions() || worked;
    FailWithoutCoordinator();
    worked = RunPlanned() || worked;
    const double now = Now();
    if (now - last_peer_check_ > (AnyPending() ? kCheckPendingSeconds : kCheckIdleSeconds)) {
      last_peer_check_ = now;
      CheckPeers();
      worked = DeliverVerdicts() || worked;
      worked = !decisions_.empty() || worked;
    }
    if (worked) {
      idle_since_ = 0;
    } else {
      Idle(seen);
    }
  }
  Leave();
}

bool Engine::OnCommunicationThread() { return on_communication_thread; }

bool Engine::TakeSubmissions() {
  std::vector<std::unique_ptr<Request>> requests;
  Status failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (inline_busy_) return false;  // LeaveInline rings
    std::swap(failure, inline_failure_);
    requests.swap(submitted_);
  }
  if (!failure.ok()) Break(WithSuspects(failure));
  for (auto& request : requests) Announce(std::move(request));
  return !requests.empty();
}

bool Engine::RunDecisions() {
  const bool any = !decisions_.empty();
  while (!decisions_.empty()) {
    const Decision decision = std::move(decisions_.front());
    decisions_.pop_front();
    Decide(decision);
  }
  return any;
}

void Engine::Decide(const Decision& decision) {
  if (decision.id == 0 && decision.name == kJoin) {
    EndJoin(decision);
    return;
  }
  if (std::find(decision.joined.begin(), decision.joined.end(), transport_.rank) != decision.joined.end()) {
    RunAsJoined(decision);
    return;
  }
  const bool by_id = coordinator_ == nullptr && decision.id != 0 && !decision.gives_id;
  const auto at = pending_.find(by_id ? known_.At(decision.id)->name : decision.name);
  // Everything pending may have been failed by an abort that overtook the decision.
  if (at == pending_.end()) return;
  const std::unique_ptr<Request> request = std::move(at->second.front());
  at->second.pop_front();
  if (at->second.empty()) pending_.erase(at);
  --num_pending_;
  if (coordinator_ == nullptr && decision.gives_id) known_.Add(request->announcement);
  coordinated_.fetch_add(1, std::memory_order_relaxed);
  if ((request->announcement.flags & DDL_FLAG_RESUMES) != 0) ResumeLane();
  const double started = Trace::Stamp();
  Status status(decision.code, decision.message);
  bool broken = false;
  if (status.ok()) {
    BeginRun(request->announcement);
    status = executor_.Run(*request, decision, &broken);
    status = EndRun(status, broken);
  }
  if (started > 0) request->TraceRun(decision.agreed, started, status.code());
  Finish(*request, status);
}

void Engine::BeginRun(const Announcement& announcement) {
  running_ = &announcement;
  heartbeat_.SetBusy((announcement.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK)) != 0);
}

Status Engine::EndRun(const Status& status, bool broken) {
  running_ = nullptr;
  heartbeat_.SetBusy(false);
  if (const std::string warning = executor_.TakeWarning(); !warning.empty()) Warn(warning);
  if (!broken) return status;
  const Status told = WithSuspects(status);
  Break(told);
  return told;
}

void Engine::Finish(const Request& request, const Status& status) {
  request.ticket.reset();
  if (lane_ != nullptr && request.small) num_small_.fetch_sub(1, std::memory_order_relaxed);
  // First: a thread that waits for this may go to the next rendezvous at once.
  OwnBlock(*memory_).outstanding.fetch_sub(1, std::memory_order_release);
  request.done(request.user, status.code(), status.message().c_str());
}

ddl_counters Engine::counters() const {
  const MessageCount& sent = channel_.sent();
  const MessageCount& received = channel_.received();
  ddl_counters all{sent.messages, received.messages, sent.bytes, received.bytes,
                   coordinated_,  inline_,           planned_,   demoted_};
  const Engine* const lane = planned_engine_.load(std::memory_order_acquire);
  if (lane == nullptr) return all;
  const ddl_counters its = lane->counters();
  all.control_sent += its.control_sent;
  all.control_received += its.control_received;
  all.control_bytes_sent += its.control_bytes_sent;
  all.control_bytes_received += its.control_bytes_received;
  all.planned = its.planned;
  all.demoted = its.demoted;
  return all;
}

void Engine::Idle(uint32_t seen) {
  const double now = Now();
  if (idle_since_ == 0) idle_since_ = now;
  const bool waits = num_pending_ > 0 || (lane_ != nullptr && lane_->waits_since() > 0);
  if (waits && now - idle_since_ < kSpinSeconds) {
    for (int i = 0; i < 50; ++i) CpuRelax();
    return;
  }
  int64_t sleep_us = 100'000;
  if (lane_ != nullptr) {
    sleep_us = AnyPending() ? 20'000 : 50'000;
    if (lane_->NeedsPolling()) {
      sleep_us = std::clamp<int64_t>(static_cast<int64_t>((now - idle_since_) * 1e6 / 8), 20, 500);
    }
  } else if (num_pending_ > 0 || !channel_.Idle() || !channel_.NothingArriving()) {
    sleep_us = 20'000;
    // Messages from other hosts do not ring the bell, nor does a mailbox that has room again: poll for them, less and
    // less often while nothing arrives.
    if (channel_.NeedsPolling() || !channel_.Idle()) {
      sleep_us = std::clamp<int64_t>(static_cast<int64_t>((now - idle_since_) * 1e6 / 8), 20, 500);
    }
  }
  SleepUntilRung(memory_->own(), seen, sleep_us);
}

void Engine::Warn(const std::string& message) const {
  if (warn_ != nullptr) {
    warn_(warn_user_, message.c_str());
  } else {
    std::fprintf(stderr, "keras_ddl: %s\n", message.c_str());
  }
}

}  // namespace ddl
