// Executor: runs one collective that all ranks have agreed on, whichever way: on a communication thread, or inline on a
// calling thread.
#ifndef KERAS_DDL_CORE_ENGINE_EXECUTOR_H_
#define KERAS_DDL_CORE_ENGINE_EXECUTOR_H_

#include <string>
#include <utility>
#include <vector>

#include "control/message.h"
#include "engine/feedback.h"
#include "engine/neutral_request.h"
#include "engine/request.h"
#include "hierarchy/hierarchical_collectives.h"

namespace ddl {

class Executor {
 public:
  // `feedback_bytes`: see ddl_options.
  Executor(const ddl_transport& transport, HierarchicalCollectives& collectives, uint64_t feedback_bytes)
      : transport_(transport), collectives_(collectives), feedback_(feedback_bytes) {}

  // COLLECTIVE. A status other than OK with `*broken` false concerns only this request, equally on every rank. With
  // `*broken` true the ranks are out of step and the communicator must be given up.
  Status Run(const Request& request, const Decision& decision, bool* broken);
  // The same on a rank that has joined: its part in what the others have submitted.
  Status RunJoined(const Decision& decision, bool* broken);
  // What is to be reported of the collectives so far, once; "" for nothing.
  std::string TakeWarning() { return std::exchange(warning_, {}); }
  // The rank's join has ended: frees what RunJoined kept.
  void EndJoin() { neutral_.Forget(); }

 private:
  Status RunWithMemory(const Request& request, const Decision& decision, bool* broken);
  Status AllReduce(const Request& request, const View& in, const View& out, const std::optional<Scheme>& scheme,
                   bool* broken);
  Status IntegerMean(const View& in, const View& out, ddl_dtype dtype);
  Status PlainAllReduce(const View& in, const View& out, ddl_dtype dtype, ddl_op op);
  Status CheckedAllReduce(const Request& request, const View& in, const View& out, bool* broken);
  Status ReduceScatter(const Request& request, const View& in, bool* broken);
  Status AllGather(const Request& request, const View& in, const std::vector<uint64_t>& rows, bool* broken);
  Status AllToAll(const Request& request, const std::vector<uint64_t>& rows, bool* broken);

  const ddl_transport& transport_;
  HierarchicalCollectives& collectives_;
  NeutralRequest neutral_;
  Feedback feedback_;
  std::string warning_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_EXECUTOR_H_
