#include "engine/planned_runs.h"

#include <algorithm>
#include <utility>

namespace ddl {
namespace {

constexpr size_t kDemotedKept = 16;

}  // namespace

bool PlannedRuns::IsOf(const Run& run, const PlanPlace& place) {
  return run.place.plan == place.plan && run.place.run == place.run && run.place.size == place.size &&
         !run.came[place.index];
}

PlannedRuns::Run& PlannedRuns::RunOf(const PlanPlace& place, double now) {
  const auto found = std::find_if(runs_.begin(), runs_.end(), [&](const Run& run) { return IsOf(run, place); });
  if (found != runs_.end()) return *found;
  Run& made = runs_.emplace_back();
  made.place = place;
  made.moved = now;
  made.requests.resize(place.size);
  made.came.resize(place.size, false);
  return made;
}

void PlannedRuns::Add(std::unique_ptr<Request> request, double now) {
  const PlanPlace place = request->place;
  const auto late = std::find_if(demoted_.begin(), demoted_.end(), [&](const Run& run) { return IsOf(run, place); });
  if (late != demoted_.end()) {
    late->came[place.index] = true;
    request->ticket = ticket_;
    demote_(std::move(request));
    return;
  }
  Run& run = RunOf(place, now);
  run.came[place.index] = true;
  run.requests[place.index] = std::move(request);
  ++run.waiting;
  Begin();
}

void PlannedRuns::Skip(const PlanPlace& place, double now) {
  const auto late = std::find_if(demoted_.begin(), demoted_.end(), [&](const Run& run) { return IsOf(run, place); });
  if (late != demoted_.end()) {
    late->came[place.index] = true;
    return;
  }
  RunOf(place, now).came[place.index] = true;
  Advance(now);
}

// Passes over what was run elsewhere.
void PlannedRuns::Advance(double now) {
  while (!runs_.empty()) {
    Begin();
    if (runs_.empty()) return;
    Run& run = runs_.front();
    while (run.next < run.place.size && run.came[run.next] && run.requests[run.next] == nullptr) {
      ++run.next;
      run.moved = now;
    }
    if (run.next < run.place.size) return;
    runs_.pop_front();
    if (!runs_.empty()) runs_.front().moved = now;
  }
}

void PlannedRuns::Begin() {
  while (!runs_.empty()) {
    Run& run = runs_.front();
    const bool begins = run.number == 0;
    if (begins) run.number = ++begun_;
    const bool overtakes = begins && ticket_.use_count() > 1;
    if (run.number > demoted_until_ && !overtakes) return;
    passed_ = true;
    DemoteFirst();
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

void PlannedRuns::DemoteFirst() {
  Run run = std::move(runs_.front());
  runs_.pop_front();
  for (auto& request : run.requests) {
    if (request == nullptr) continue;
    request->ticket = ticket_;
    demote_(std::move(request));
  }
  if (std::all_of(run.came.begin(), run.came.end(), [](bool came) { return came; })) return;
  demoted_.push_back(std::move(run));
  if (demoted_.size() > kDemotedKept) demoted_.pop_front();
}

void PlannedRuns::DemoteUntil(uint64_t until, uint64_t number, bool posted) {
  demoted_until_ = std::max(demoted_until_, until);
  if (posted || passed_) {
    begun_ = std::max(begun_, number);
    if (!runs_.empty()) runs_.front().number = begun_;
  }
  Begin();
  passed_ = false;
}

void PlannedRuns::DemoteStuck(double now, double patience_s) {
  if (runs_.empty()) return;
  const Run& run = runs_.front();
  const bool others = run.waiting > 0 || runs_.size() > 1;
  if (!others || run.requests[run.next] != nullptr || now - run.moved < patience_s) return;
  DemoteFirst();
  Advance(now);
}

void PlannedRuns::DemoteAll() {
  while (!runs_.empty()) DemoteFirst();
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
