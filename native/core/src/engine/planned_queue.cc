#include "engine/planned_queue.h"

#include <algorithm>
#include <utility>

#include "base/guard.h"
#include "base/text.h"
#include "base/trace.h"
#include "base/waiter.h"
#include "control/coordinator.h"
#include "engine/engine_block.h"

namespace ddl {
namespace {

// How long ranks wait for a rank that has nothing to run.
constexpr double kPatienceSeconds = 2.0;

double PatienceOf(const Endpoint& endpoint) {
  double patience_s = kPatienceSeconds;
  for (const double limit : {endpoint.warn_after_s(), endpoint.deadline_s()}) {
    if (limit > 0) patience_s = std::min(patience_s, limit / 4);
  }
  return patience_s;
}

}  // namespace

PlannedQueue::PlannedQueue(Endpoint& endpoint, Submissions& fallback)
    : Queue(endpoint),
      fallback_(fallback),
      lane_(endpoint.transport(), endpoint.memory(), endpoint.group(), PatienceOf(endpoint),
            [this](std::unique_ptr<Request> request) { FallBack(std::move(request)); }) {}

void PlannedQueue::Submit(std::unique_ptr<Request> request) {
  const bool small = request->small;
  if (small) CountSmall(1);
  GuardMemory([&] { submissions_.Submit(std::move(request)); },
              [&](const std::exception&) {
                if (small) CountSmall(-1);
                throw;
              });
}

void PlannedQueue::Skip(const PlanPlace& place) {
  // In order with the requests, because the same place may come again.
  auto marker = std::make_unique<Request>();
  marker->place = place;
  submissions_.SubmitMarker(std::move(marker), false);
}

void PlannedQueue::Suspend() {
  suspended_ = true;
  submissions_.Ring();
}

void PlannedQueue::Resume() {
  suspended_ = false;
  submissions_.SubmitMarker(std::make_unique<Request>(), true);  // before all later submissions
}

void PlannedQueue::Add(std::unique_ptr<Request> request) {
  if (!request->is_marker()) {
    lane_.runs().Add(std::move(request), Now());
  } else if (request->place.size > 0) {
    lane_.runs().Skip(request->place, Now());
  } else {
    lane_.Resume();
  }
}

void PlannedQueue::FallBack(std::unique_ptr<Request> request) {
  num_fallbacks_.fetch_add(1, std::memory_order_relaxed);
  const bool small = request->small;
  submissions_.CountEnded();
  fallback_.Submit(std::move(request));
  if (small) CountSmall(-1);
}

void PlannedQueue::Finish(const Request& request, const Status& status) {
  if (request.small) CountSmall(-1);
  Queue::Finish(request, status);
}

void PlannedQueue::CountSmall(int change) {
  num_small_.fetch_add(change, std::memory_order_relaxed);
  fallback_.CountSmallPlanned(change);
}

void PlannedQueue::Handle(int peer, const std::string& bytes) {
  if (TypeOf(bytes) != MessageType::kLeave) return;
  endpoint_.MarkLeft(peer);
  Close(DecodeText(bytes));
}

bool PlannedQueue::Progress() {
  if (suspended_) lane_.Suspend();
  if (!endpoint_.broken().ok()) {
    const bool any = !lane_.runs().empty();
    lane_.runs().FallBackAll();
    return any;
  }
  bool worked = false;
  std::unique_ptr<Request> request;
  Status status = lane_.Progress(Now(), &request, &worked);
  if (!status.ok()) {
    endpoint_.Break(status);
    return true;
  }
  if (request == nullptr) return worked;
  num_run_.fetch_add(1, std::memory_order_relaxed);
  Decision decision;
  if (request->announcement.kind == DDL_ALL_GATHER) {
    // All ranks have posted the same.
    decision.rows.assign(static_cast<size_t>(endpoint_.size()), request->announcement.rows);
  }
  const double started = Trace::Stamp();
  status = endpoint_.Run(*request, decision);
  if (started > 0) request->TraceRun(started, started, status.code());
  Finish(*request, status);
  return true;
}

void PlannedQueue::CheckDeadlines() {
  if (lane_.HasLost()) {
    Close("a rank has left");
    return;
  }
  const double since = lane_.waits_since();
  if (since == 0) {
    warn_after_ = endpoint_.warn_after_s();
    return;
  }
  const double waited = Now() - since;
  const bool fails = endpoint_.deadline_s() > 0 && waited > endpoint_.deadline_s();
  if (!fails && (warn_after_ <= 0 || waited <= warn_after_)) return;
  const std::vector<int> missing = lane_.Missing();
  FailedRanks ranks = InRole(DDL_RANK_NAMED, missing);
  const std::string waits = (lane_.posted() == nullptr ? "A plan" : Label(lane_.posted()->announcement)) +
                            " has waited " + std::to_string(static_cast<int>(waited)) + " s for rank(s) " +
                            FormatRanks(missing) + ", whose communication thread does not answer." +
                            endpoint_.DescribeSuspects(&ranks);
  if (fails) {
    endpoint_.Break(
        {DDL_DEADLINE_EXCEEDED, waits + " Raise KERAS_DDL_DEADLINE_SECONDS if it is only slow.", std::move(ranks)});
    return;
  }
  warn_after_ = 2 * waited;
  if (endpoint_.WarnsForGroup(waited)) endpoint_.Warn(waits + endpoint_.DescribeDeadline());
}

void PlannedQueue::Close(const std::string& reason) {
  if (!endpoint_.broken().ok()) return;
  endpoint_.SetBroken({DDL_UNAVAILABLE, reason});
  lane_.runs().FallBackAll();
  const std::string text = EncodeText(MessageType::kLeave, reason);
  for (int rank = 1; endpoint_.rank() == 0 && rank < endpoint_.size(); ++rank) {
    if (!endpoint_.left(rank)) endpoint_.channel().Send(rank, text);
  }
}

void PlannedQueue::Fail(const Status& status) {
  // Requests submitted during the failed collective must not wait for another deadline in the fallback.
  TakeSubmissions();
  for (auto& request : lane_.runs().TakeAll()) Finish(*request, WithPendingRequest(status, request->announcement));
}

std::string PlannedQueue::DescribePromised() const {
  const Request* const posted = endpoint_.broken().ok() ? lane_.posted() : nullptr;
  return posted == nullptr ? "" : Label(posted->announcement);
}

int64_t PlannedQueue::SleepUs(double idle_s) const {
  if (lane_.NeedsPolling()) return PollUs(idle_s);
  return AnyPending() ? 20'000 : 50'000;
}

}  // namespace ddl
