// Staging: turns a request on device memory into the same request on host memory. The device copies the inputs while
// the request waits for its turn, and copies the result when the request has run.
#ifndef KERAS_DDL_CORE_ENGINE_STAGING_H_
#define KERAS_DDL_CORE_ENGINE_STAGING_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "device/device.h"
#include "engine/request.h"

namespace ddl {

// Whether a buffer is on a device.
bool IsOnDevice(const ddl_request& request);

// Whether the library of a device can run the request. Ranks with the same terms get the same answer.
bool LibraryCanRun(const ddl_request& request, bool result_on_host, int size);

class Staging {
 public:
  // On the caller's thread, because Staging does not wait for work that `stream` gets afterwards. A failure is kept for
  // Run, so that all ranks learn of it.
  Staging(std::shared_ptr<Device> device, void* stream);
  // For buffers that are ready.
  explicit Staging(std::shared_ptr<Device> device) : device_(std::move(device)), stream_(nullptr) {}
  // Waits for copies that still run, or leaks their memory.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  const std::shared_ptr<Device>& device() const { return device_; }
  const DeviceEvent& ready() const { return ready_; }
  // Why the stream's work could not be waited for.
  const Status& failure() const { return failure_; }
  Status WaitUntilReady(Waiter& waiter) { return ready_.Wait(waiter, kOwnDevice); }
  // Makes `ready` wait for all work that the caller's stream has by now, which may use memory that the caller has just
  // allocated.
  Status Mark() { return device_->Mark(stream_, &ready_); }

  // Starts to copy the inputs of rank `rank`; only the first call does. Any thread, but one at a time.
  void CopyIn(const Request& request, int rank);
  // Runs `collective` on the request in host memory, then copies the result. When it returns, the result is on the
  // device, and no copy is running.
  Status Run(const Request& request, int rank, Waiter& waiter,
             const std::function<Status(const Request& on_host)>& collective);

 private:
  static constexpr char kOwnDevice[] = "its own device, which has not finished earlier work";
  Status Reserve(const Request& request, int rank);
  Status CopyOut(const std::vector<ddl_device_copy>& copies, Waiter& waiter);
  // See ddl_request.allocate.
  void* Allocate(const uint64_t* rows_by_rank, int size);

  const std::shared_ptr<Device> device_;
  void* const stream_;
  Status failure_;
  DeviceEvent ready_;  // the caller's stream has done its work from before the request
  DeviceEvent copied_;
  PinnedMemory memory_;
  PinnedMemory gathered_;  // host memory for the result that `allocate` returns
  Request on_host_;
  bool begun_ = false;
  const Request* request_ = nullptr;  // during Run
  std::vector<ddl_device_copy> out_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_STAGING_H_
