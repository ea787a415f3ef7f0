// Executor: runs one collective that the coordinator has released, on the communication thread.
#ifndef KERAS_DDL_CORE_ENGINE_EXECUTOR_H_
#define KERAS_DDL_CORE_ENGINE_EXECUTOR_H_

#include <string>
#include <vector>

#include "control/message.h"
#include "hierarchy/hierarchical_collectives.h"

namespace ddl {

// A request as the engine keeps it: what was announced, the buffers, and where the answer goes.
struct Request {
  Announcement announcement;
  std::vector<ddl_buffer> buffers;
  void* (*allocate)(void* user, const uint64_t* rows_by_rank, int size) = nullptr;
  void (*done)(void* user, int code, const char* message) = nullptr;
  void* user = nullptr;
  double submitted = 0;  // seconds, monotonic clock

  // Enters into the trace what began at `started` and ends now; see Trace::Collective.
  void TraceRun(double agreed, double started, int code) const;
  // Takes over what `from` says, but for `submitted`.
  void Describe(const ddl_request& from);
};

class Executor {
 public:
  Executor(const ddl_transport& transport, HierarchicalCollectives& collectives)
      : transport_(transport), collectives_(collectives) {}

  // COLLECTIVE. A status other than OK with `*broken` false concerns this request alone, on every rank equally; with
  // `*broken` true the ranks are out of step and the communicator must be given up.
  Status Run(const Request& request, const Decision& decision, bool* broken);

 private:
  Status RunWithMemory(const Request& request, const Decision& decision, bool* broken);
  Status AllReduce(const Request& request, const View& in, const View& out, const std::optional<Scheme>& scheme,
                   bool* broken);
  Status IntegerMean(const View& in, const View& out, ddl_dtype dtype);
  Status PlainAllReduce(const View& in, const View& out, ddl_dtype dtype, ddl_op op);
  Status CheckedAllReduce(const Request& request, const View& in, const View& out, bool* broken);
  Status ReduceScatter(const Request& request, const View& in, bool* broken);
  Status AllGather(const Request& request, const View& in, const std::vector<uint64_t>& rows, bool* broken);

  const ddl_transport& transport_;
  HierarchicalCollectives& collectives_;
};

// Refuses what no rank could run. `size`: ranks of the communicator.
Status Validate(const ddl_request& request, int size);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_EXECUTOR_H_
