#include "device/device.h"

#include <unistd.h>

namespace ddl {
namespace {

constexpr double kSettleSeconds = 2.0;
constexpr unsigned kSettlePollUs = 50;

}  // namespace

void DeviceEvent::Forget() {
  if (event_ != nullptr) device_->table().forget(device_->table().self, std::exchange(event_, nullptr));
}

Status DeviceEvent::Test(bool* done) {
  int is_done = 1;
  if (event_ != nullptr) {
    DDL_RETURN_IF_ERROR(device_->As(device_->table().test(device_->table().self, event_, &is_done), "waiting for it"));
  }
  *done = is_done != 0;
  if (*done) Forget();
  return {};
}

Status DeviceEvent::Wait(Waiter& waiter, const char* waits_for) {
  Status failure;
  bool done = false;
  DDL_RETURN_IF_ERROR(waiter.Until(
      [&] {
        failure = Test(&done);
        return done || !failure.ok();
      },
      [waits_for] { return std::string(waits_for); }));
  return failure;
}

bool DeviceEvent::Settle() {
  bool done = false;
  for (const double start = Now(); Test(&done).ok() && !done;) {
    if (Now() - start > kSettleSeconds) return false;
    usleep(kSettlePollUs);
  }
  return true;
}

Status PinnedMemory::Reserve(Device& device, uint64_t bytes) {
  Release();
  device_ = &device;
  // No bytes have an address, too.
  return device.As(device.table().reserve(device.table().self, bytes + 1, &memory_), "reserving memory of the host");
}

void PinnedMemory::Release() {
  if (memory_ != nullptr) device_->table().release(device_->table().self, std::exchange(memory_, nullptr));
}

Device::~Device() {
  DisconnectAll(true);
  table_.destroy(table_.self);
}

Status Device::As(int code, const char* what) const {
  if (code == DDL_OK) return {};
  return {static_cast<ddl_code>(code),
          std::string(table_.name) + ": " + what + " failed: " + table_.last_error(table_.self)};
}

Status Device::Mark(void* stream, DeviceEvent* event) {
  void* made = nullptr;
  DDL_RETURN_IF_ERROR(As(table_.mark(table_.self, stream, &made), "marking its stream"));
  *event = DeviceEvent(this, made);
  return {};
}

Status Device::Copy(bool to_host, const DeviceEvent& after, const std::vector<ddl_device_copy>& copies,
                    DeviceEvent* event) {
  if (copies.empty()) return {};
  void* made = nullptr;
  DDL_RETURN_IF_ERROR(As(table_.copy(table_.self, to_host ? 1 : 0, after.get(), copies.data(),
                                     static_cast<uint32_t>(copies.size()), &made),
                         to_host ? "copying to the host" : "copying from the host"));
  *event = DeviceEvent(this, made);
  return {};
}

Status Device::WaitUntilReady(ddl_device_group group, Waiter& waiter, const char* what, double limit_s,
                              bool* is_ready) {
  Status failure;
  int ready = 0;
  const double start = Now();
  DDL_RETURN_IF_ERROR(waiter.Until(
      [&] {
        failure = As(table_.poll(table_.self, group, &ready), what);
        return ready != 0 || !failure.ok() || (limit_s > 0 && Now() - start > limit_s);
      },
      [what] { return std::string("the other ranks' devices in ") + what; }));
  *is_ready = ready != 0;
  return failure;
}

Status Device::Connect(ddl_device_group group) {
  const DeviceGroup& to = groups_[group];
  return As(table_.connect(table_.self, group, to.id.data(), to.rank, to.size), "connecting");
}

Status Device::Finish(ddl_device_group group, Waiter& waiter, DeviceEvent* event) {
  void* made = nullptr;
  bool begun = false;
  DDL_RETURN_IF_ERROR(WaitUntilReady(group, waiter, "a collective", 0, &begun));
  DDL_RETURN_IF_ERROR(As(table_.finish(table_.self, &made), "a collective"));
  *event = DeviceEvent(this, made);
  // An error of the group shows in `poll`, and never in an event.
  Status failure;
  bool done = false;
  DDL_RETURN_IF_ERROR(waiter.Until(
      [&] {
        int ready = 0;
        failure = event->Test(&done);
        if (failure.ok() && !done) failure = As(table_.poll(table_.self, group, &ready), "a collective");
        return done || !failure.ok();
      },
      [] { return std::string("the other ranks' devices in a collective"); }));
  return failure;
}

Status Device::Run(ddl_device_group group, const ddl_device_collective& collective, const DeviceEvent& after,
                   Waiter& waiter) {
  DeviceEvent event;
  Status status = As(table_.run(table_.self, group, &collective, after.get()), "a collective");
  if (status.ok()) status = Finish(group, waiter, &event);
  if (status.ok()) return {};
  // Running work on the device must not write to memory that the caller then has back.
  Disconnect(group, true);
  (void)event.Settle();
  return status;
}

void Device::Disconnect(ddl_device_group group, bool abort) {
  table_.disconnect(table_.self, group, abort ? 1 : 0);
  groups_[group].state = DeviceGroup::kGivenUp;
}

void Device::DisconnectAll(bool abort) {
  for (const ddl_device_group group : {DDL_ALL_RANKS, DDL_HOST_RANKS}) {
    if (groups_[group].state == DeviceGroup::kConnected) Disconnect(group, abort);
  }
}

}  // namespace ddl
