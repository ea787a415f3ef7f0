// Device: a ddl_device with Status and owners. Its memory is only passed on here, never read.
#ifndef KERAS_DDL_CORE_DEVICE_DEVICE_H_
#define KERAS_DDL_CORE_DEVICE_DEVICE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/waiter.h"
#include "ddl_device.h"

namespace ddl {

class Device;

// An event of a device, given back at the end. Empty: done.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  DeviceEvent(Device* device, void* event) : device_(device), event_(event) {}
  ~DeviceEvent() { Forget(); }
  DeviceEvent(DeviceEvent&& from) noexcept : device_(from.device_), event_(std::exchange(from.event_, nullptr)) {}
  DeviceEvent& operator=(DeviceEvent&& from) noexcept {
    Forget();
    device_ = from.device_;
    event_ = std::exchange(from.event_, nullptr);
    return *this;
  }

  void* get() const { return event_; }
  void Forget();
  // *done: whether the event is done. Not OK: the device has failed.
  Status Test(bool* done);
  // Waits for the device with the health of `waiter`. `waits_for`: for messages.
  Status Wait(Waiter& waiter, const char* waits_for);
  // Waits for at most a second or two. False: the event is not done, and its memory is still in use.
  bool Settle();

 private:
  Device* device_ = nullptr;
  void* event_ = nullptr;
};

// Memory of the host for copies to and from a device, given back at the end.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory() { Release(); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  Status Reserve(Device& device, uint64_t bytes);
  void Release();
  // Keeps the memory until the process ends, because it stays in use.
  void Leak() { memory_ = nullptr; }
  char* data() const { return static_cast<char*>(memory_); }

 private:
  Device* device_ = nullptr;
  void* memory_ = nullptr;
};

// The ranks' device library, and whether they use it.
class DeviceLibrary {
 public:
  enum State { kNone, kUnconnected, kConnected, kGivenUp };
  std::atomic<State> state{kNone};
  std::array<uint8_t, DDL_DEVICE_ID_BYTES> id{};
  bool required = false;  // there is no other way: see DDL_DEVICE_LIBRARY
};

class Device {
 public:
  explicit Device(const ddl_device& table) : table_(table) {}
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const ddl_device& table() const { return table_; }
  bool Has(const ddl_location& location) const {
    return location.kind == table_.location.kind && location.id == table_.location.id;
  }
  DeviceLibrary& library() { return library_; }

  Status Mark(void* stream, DeviceEvent* event);
  Status Copy(bool to_host, const DeviceEvent& after, const std::vector<ddl_device_copy>& copies, DeviceEvent* event);

  // Functions of the library, for one thread at a time. Connect: begins to connect. WaitUntilReady: *ready is true once
  // the next call may follow, or false after `limit_s` (0: no limit). Run: COLLECTIVE, leaves the group when it fails.
  Status Connect(int rank, int size);
  Status WaitUntilReady(Waiter& waiter, const char* what, double limit_s, bool* ready);
  Status Run(const ddl_device_collective& collective, const DeviceEvent& after, Waiter& waiter);
  void Disconnect(bool abort);

  // The status of a function of the table.
  Status As(int code, const char* what) const;

  // Requests whose data passed through the host's memory, and those that the library ran.
  std::atomic<uint64_t> num_staged{0};
  std::atomic<uint64_t> num_by_library{0};

 private:
  Status Finish(Waiter& waiter, DeviceEvent* event);

  const ddl_device table_;
  DeviceLibrary library_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_DEVICE_DEVICE_H_
