// Executor: runs one collective that all ranks have agreed on, either on a communication thread or inline on a calling
// thread.
#ifndef KERAS_DDL_CORE_ENGINE_EXECUTOR_H_
#define KERAS_DDL_CORE_ENGINE_EXECUTOR_H_

#include <string>
#include <utility>
#include <vector>

#include "base/waiter.h"
#include "control/message.h"
#include "device/device.h"
#include "engine/feedback.h"
#include "engine/neutral_request.h"
#include "engine/request.h"
#include "hierarchy/hierarchical_collectives.h"

namespace ddl {

class Executor {
 public:
  // `feedback_bytes`: see ddl_options. `waiter` waits for devices.
  Executor(const ddl_transport& transport, HierarchicalCollectives& collectives, Waiter& waiter,
           uint64_t feedback_bytes)
      : transport_(transport), collectives_(collectives), waiter_(waiter), feedback_(feedback_bytes) {}

  // COLLECTIVE. After a failure the ranks are out of step and the communicator must be given up, except after
  // DDL_DATA_LOSS (a failed `check`), with which only this request fails, on every rank.
  Status Run(const Request& request, const Decision& decision);
  // The same on a rank that has joined: its part in a collective of the other ranks.
  Status RunJoined(const Decision& decision);
  // Returns and clears a warning about the collectives so far; "" for none.
  std::string TakeWarning() { return std::exchange(warning_, {}); }
  // The rank's join has ended: frees the memory of RunJoined.
  void EndJoin() { neutral_.Forget(); }

 private:
  Status RunWithMemory(const Request& request, const Decision& decision);
  // executor_device.cc: requests with buffers on a device.
  Status RunOnDevice(const Request& request, const Decision& decision);
  Status FindWays(Device& device, uint32_t kind, std::vector<Way>* ways);
  Status ConnectGroup(Device& device, ddl_device_group group);
  Status RunBy(Way way, const Request& request, const Decision& decision);
  Status TimeWays(WayChoice& choice, const std::vector<Way>& ways, const Request& request, const Decision& decision);
  Status RunByLibrary(const Request& request, const Decision& decision);
  Status RunHierarchical(const Request& request);
  Status RunLibrary(ddl_device_group group, ddl_kind kind, const Request& request,
                    const std::vector<ddl_buffer>& buffers, const DeviceEvent& after);

  static Status AllocateRows(const Request& request, const std::vector<uint64_t>& rows, char** out);
  Status AllReduce(const Request& request, const View& in, const View& out, const std::optional<Scheme>& scheme);
  Status IntegerMean(const View& in, const View& out, ddl_dtype dtype);
  Status PlainAllReduce(const View& in, const View& out, ddl_dtype dtype, ddl_op op);
  Status CheckedAllReduce(const Request& request, const View& in, const View& out);
  Status ReduceScatter(const Request& request, const View& in);
  Status AllGather(const Request& request, const View& in, const std::vector<uint64_t>& rows);
  Status ExchangeSplits(const std::vector<int64_t>& splits, std::vector<uint64_t>* rows);
  Status AllToAll(const Request& request, const std::vector<uint64_t>& decided);

  const ddl_transport& transport_;
  HierarchicalCollectives& collectives_;
  Waiter& waiter_;
  NeutralRequest neutral_;
  Feedback feedback_;
  std::string warning_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_EXECUTOR_H_
