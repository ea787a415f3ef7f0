#include "engine/planned_runs.h"

#include <algorithm>
#include <utility>

namespace ddl {
namespace {

constexpr size_t kFallenBackKept = 16;

}  // namespace

bool PlannedRuns::IsOf(const Run& run, const PlanPlace& place) {
  return run.place.plan == place.plan && run.place.run == place.run && run.place.size == place.size &&
         !run.arrived[place.index];
}

PlannedRuns::Run& PlannedRuns::RunOf(const PlanPlace& place, double now) {
  const auto at = std::find_if(runs_.begin(), runs_.end(), [&](const Run& run) { return IsOf(run, place); });
  if (at != runs_.end()) return *at;
  Run& made = runs_.emplace_back();
  made.place = place;
  made.advanced_at = now;
  made.requests.resize(place.size);
  made.arrived.resize(place.size, false);
  return made;
}

bool PlannedRuns::ArrivesLate(const PlanPlace& place) {
  for (Run& run : fallen_back_) {
    if (!IsOf(run, place)) continue;
    run.arrived[place.index] = true;
    return true;
  }
  return false;
}

void PlannedRuns::Add(std::unique_ptr<Request> request, double now) {
  const PlanPlace place = request->place;
  if (ArrivesLate(place)) {
    request->ticket = ticket_;
    fall_back_(std::move(request));
    return;
  }
  Run& run = RunOf(place, now);
  run.arrived[place.index] = true;
  run.requests[place.index] = std::move(request);
  ++run.waiting;
  Begin();
}

void PlannedRuns::Skip(const PlanPlace& place, double now) {
  if (ArrivesLate(place)) return;
  RunOf(place, now).arrived[place.index] = true;
  Advance(now);
}

// Skips collectives that have run inline.
void PlannedRuns::Advance(double now) {
  while (!runs_.empty()) {
    Begin();
    if (runs_.empty()) return;
    Run& run = runs_.front();
    while (run.next < run.place.size && run.arrived[run.next] && run.requests[run.next] == nullptr) {
      ++run.next;
      run.advanced_at = now;
    }
    if (run.next < run.place.size) return;
    runs_.pop_front();
    if (!runs_.empty()) runs_.front().advanced_at = now;
  }
}

void PlannedRuns::Begin() {
  while (!runs_.empty()) {
    Run& run = runs_.front();
    const bool begins = run.number == 0;
    if (begins) run.number = ++begun_;
    const bool overtakes = begins && ticket_.use_count() > 1;
    if (run.number > fall_back_until_ && !overtakes) return;
    fell_back_by_number_ = true;
    FallBackFirst();
  }
}

Request* PlannedRuns::Next(uint64_t* number) {
  if (runs_.empty()) return nullptr;
  const Run& run = runs_.front();
  *number = run.number;
  return run.requests[run.next].get();
}

std::unique_ptr<Request> PlannedRuns::Take(double now) {
  Run& run = runs_.front();
  std::unique_ptr<Request> request = std::move(run.requests[run.next]);
  --run.waiting;
  Advance(now);
  return request;
}

void PlannedRuns::FallBackFirst() {
  Run run = std::move(runs_.front());
  runs_.pop_front();
  for (auto& request : run.requests) {
    if (request == nullptr) continue;
    request->ticket = ticket_;
    fall_back_(std::move(request));
  }
  if (std::all_of(run.arrived.begin(), run.arrived.end(), [](bool arrived) { return arrived; })) return;
  fallen_back_.push_back(std::move(run));
  if (fallen_back_.size() > kFallenBackKept) fallen_back_.pop_front();
}

void PlannedRuns::FallBackUntil(uint64_t until, uint64_t number, bool posted) {
  fall_back_until_ = std::max(fall_back_until_, until);
  if (posted || fell_back_by_number_) {
    begun_ = std::max(begun_, number);
    if (!runs_.empty()) runs_.front().number = begun_;
  }
  Begin();
  fell_back_by_number_ = false;
}

void PlannedRuns::FallBackIfStuck(double now, double patience_s) {
  if (runs_.empty()) return;
  const Run& run = runs_.front();
  const bool others = run.waiting > 0 || runs_.size() > 1;
  if (!others || run.requests[run.next] != nullptr || now - run.advanced_at < patience_s) return;
  FallBackFirst();
  Advance(now);
}

void PlannedRuns::FallBackAll() {
  while (!runs_.empty()) FallBackFirst();
}

std::vector<std::unique_ptr<Request>> PlannedRuns::TakeAll() {
  std::vector<std::unique_ptr<Request>> all;
  for (Run& run : runs_) {
    for (auto& request : run.requests) {
      if (request != nullptr) all.push_back(std::move(request));
    }
  }
  runs_.clear();
  return all;
}

}  // namespace ddl
