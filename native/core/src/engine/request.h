// Request: a ddl_request as the engine keeps it.
#ifndef KERAS_DDL_CORE_ENGINE_REQUEST_H_
#define KERAS_DDL_CORE_ENGINE_REQUEST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/message.h"
#include "ddl.h"

namespace ddl {

class Staging;

// The place of a request in a plan: collective `index` of `size`.
struct PlanPlace {
  uint64_t plan = 0;  // a hash of all its collectives
  uint64_t run = 0;   // equal for all requests of one run of the plan; the next run differs, or repeats an index
  uint32_t index = 0;
  uint32_t size = 0;  // 0: not planned
};

// One request: its announcement, its buffers, and the callbacks for its result.
struct Request {
  Announcement announcement;
  std::vector<ddl_buffer> buffers;
  void* (*allocate)(void* user, const uint64_t* rows_by_rank, int size) = nullptr;
  void (*done)(void* user, const ddl_failure* failure) = nullptr;
  void* user = nullptr;
  std::string feedback;  // see ddl_request
  double submitted = 0;  // when it was submitted, in seconds of the monotonic clock
  double announced = 0;  // when the coordinator was sent the announcement, on the same clock
  PlanPlace place;
  bool small = false;                   // planned, and its data could go through a rendezvous
  mutable std::shared_ptr<int> ticket;  // see PlannedRuns; released when the request is done
  int size = 0;                         // ranks of the communicator
  std::shared_ptr<Staging> staging;     // set if its buffers are on a device
  bool result_on_host = false;          // `allocate` returns host memory, even if the buffers are on a device

  // Whether this is not a collective, but an instruction to a queue at this point of the submissions.
  bool is_marker() const { return done == nullptr; }
  // Adds to the trace the run that began at `started` and ends now; see Trace::Collective.
  void TraceRun(double agreed, double started, int code) const;
  // Copies everything from `from`; `submitted` is left alone. `size`: ranks of the communicator.
  void Describe(const ddl_request& from, int size);
};

// Returns the properties of a request that must be equal on all ranks.
Terms TermsOf(const ddl_request& request);

uint64_t BytesOf(const ddl_request& request);

// Rejects requests that no rank could run. `size`: ranks of the communicator.
Status Validate(const ddl_request& request, int size);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_REQUEST_H_
