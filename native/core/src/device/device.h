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
#include "device/way_choice.h"

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

// Ranks that the device's library connects.
struct DeviceGroup {
  enum State { kNone, kUnconnected, kConnected, kGivenUp };
  std::atomic<State> state{kNone};
  std::array<uint8_t, DDL_DEVICE_ID_BYTES> id{};
  int rank = 0;  // this one's in the group
  int size = 1;
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
  // What the ranks have agreed on, before the device's first use: the groups, whether they must connect because there
  // is no other way (see ddl_device_mode), and whether the fastest of several ways is to be chosen.
  DeviceGroup& group(ddl_device_group group) { return groups_[group]; }
  bool required = false;
  bool chooses = false;
  WayChoice& choice(uint32_t kind, uint64_t bytes) { return choices_.For(kind, bytes); }
  // Whether the library may run collectives of this kind. The same on all ranks, even if only some know already that a
  // group could not connect. Any thread.
  bool MayUseLibrary(uint32_t kind) {
    return AnyGroup(kind, [](auto state) { return state != DeviceGroup::kNone; });
  }
  // Whether a collective will pass through the host's memory, as far as is known. Any thread.
  bool WillStage(uint32_t kind, uint64_t bytes) {
    return choice(kind, bytes).chosen() == Way::kStaged || !AnyGroup(kind, [](auto state) {
             return state == DeviceGroup::kUnconnected || state == DeviceGroup::kConnected;
           });
  }

  Status Mark(void* stream, DeviceEvent* event);
  Status Copy(bool to_host, const DeviceEvent& after, const std::vector<ddl_device_copy>& copies, DeviceEvent* event);

  // Functions of the library, for one thread at a time. Connect: begins to connect. WaitUntilReady: *ready is true once
  // the next call may follow, or false after `limit_s` (0: no limit). Run: COLLECTIVE, leaves the group when it fails.
  Status Connect(ddl_device_group group);
  Status WaitUntilReady(ddl_device_group group, Waiter& waiter, const char* what, double limit_s, bool* ready);
  Status Run(ddl_device_group group, const ddl_device_collective& collective, const DeviceEvent& after, Waiter& waiter);
  void Disconnect(ddl_device_group group, bool abort);
  // Leaves the groups that are connected.
  void DisconnectAll(bool abort);

  // The status of a function of the table.
  Status As(int code, const char* what) const;

  // Collectives that ran in each way.
  std::array<std::atomic<uint64_t>, kNumWays> num_run{};

 private:
  Status Finish(ddl_device_group group, Waiter& waiter, DeviceEvent* event);
  // Whether the state of a group that may run collectives of this kind passes `test`.
  template <typename Test>
  bool AnyGroup(uint32_t kind, Test test) const {
    return test(groups_[DDL_ALL_RANKS].state.load()) ||
           (kind == DDL_ALL_REDUCE && test(groups_[DDL_HOST_RANKS].state.load()));
  }

  const ddl_device table_;
  std::array<DeviceGroup, DDL_NUM_DEVICE_GROUPS> groups_;
  WayChoices choices_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_DEVICE_DEVICE_H_
