// Staging: a request whose buffers lie on a device, as the same request on memory of the host. The device copies what
// is read while the request waits for its turn, and the result when it has run.
#ifndef KERAS_DDL_CORE_ENGINE_STAGING_H_
#define KERAS_DDL_CORE_ENGINE_STAGING_H_

#include <functional>
#include <memory>
#include <vector>

#include "device/device.h"
#include "engine/request.h"

namespace ddl {

// Whether a buffer lies on a device.
bool IsOnDevice(const ddl_request& request);

// Whether the library of a device can run it: the same on all ranks, with the same terms.
bool LibraryCanRun(const ddl_request& request, bool result_on_host, int size);

class Staging {
 public:
  // Any thread, that of the caller: the work that `stream` has from then on is not waited for. A failure is kept for
  // Run, so that all ranks learn of it.
  Staging(std::shared_ptr<Device> device, void* stream);
  // Waits for copies that still run, or leaks their memory.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  Device& device() { return *device_; }
  const DeviceEvent& ready() const { return ready_; }

  // Starts to copy what rank `rank` reads; only the first time. Any thread, but one at a time.
  void CopyIn(const Request& request, int rank);
  // Runs `collective` on the request on the host's memory, then copies the result. The results are on the device when
  // it returns, and nothing runs there for them.
  Status Run(const Request& request, int rank, Waiter& waiter,
             const std::function<Status(const Request& on_host)>& collective);

 private:
  Status Reserve(const Request& request, int rank);
  Status CopyOut(const std::vector<ddl_device_copy>& copies, Waiter& waiter);
  // See ddl_request.allocate.
  void* Allocate(const uint64_t* rows_by_rank, int size);

  const std::shared_ptr<Device> device_;
  Status failure_;
  DeviceEvent ready_;  // the caller's stream has done what was before the request
  DeviceEvent copied_;
  PinnedMemory memory_;
  PinnedMemory gathered_;  // what `allocate` returns stands for this
  Request on_host_;
  bool begun_ = false;
  const Request* request_ = nullptr;  // during Run
  std::vector<ddl_device_copy> out_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_STAGING_H_
