// A CUDA device behind the table of ddl_device.h. It has three streams: copies to the host, copies from it, and NCCL's.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ddl_cuda.h"
#include "functions.h"
#include "nccl_group.h"
#include "pinned_pool.h"

namespace ddl_cuda {
namespace {

thread_local std::string last_error;

class Device {
 public:
  Device(const CudaFunctions& cuda, const NcclFunctions* nccl) : cuda_(cuda), nccl_(nccl), pool_(cuda) {
    if (nccl != nullptr) group_ = std::make_unique<NcclGroup>(*nccl);
  }
  ~Device();

  bool Open(int ordinal, ddl_device* out);
  bool Check(int result, const char* what) const;

  const CudaFunctions& cuda() const { return cuda_; }
  const NcclFunctions* nccl() const { return nccl_; }
  PinnedPool& pool() { return pool_; }
  NcclGroup& group() { return *group_; }
  CudaContext context() const { return context_; }
  CudaStream stream_of_library() const { return streams_[2]; }

  CudaEvent TakeEvent();
  void GiveBackEvent(CudaEvent event);
  // Returns an event for all work of `stream`; NULL: it failed.
  CudaEvent Record(CudaStream stream);
  bool Copy(bool to_host, CudaEvent after, const ddl_device_copy* copies, uint32_t num_copies, CudaEvent* event);
  bool WaitFor(CudaStream stream, CudaEvent after);

 private:
  const CudaFunctions& cuda_;
  const NcclFunctions* const nccl_;
  CudaDevice device_ = 0;
  CudaContext context_ = nullptr;
  CudaStream streams_[3] = {};
  PinnedPool pool_;
  std::unique_ptr<NcclGroup> group_;
  std::mutex copying_[2];  // to the host, from it: a copy's wait, pieces and event come together
  std::mutex events_mutex_;
  std::vector<CudaEvent> events_;  // free ones
};

// Keeps the device's context current on this thread during its lifetime.
class Current {
 public:
  explicit Current(const Device& device) : device_(device) {
    entered_ =
        device.context() != nullptr && device.Check(device.cuda().CtxPushCurrent(device.context()), "its context");
  }
  ~Current() {
    CudaContext ignored = nullptr;
    if (entered_) device_.cuda().CtxPopCurrent(&ignored);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  explicit operator bool() const { return entered_; }

 private:
  const Device& device_;
  bool entered_ = false;
};

bool Device::Check(int result, const char* what) const {
  if (result == kCudaSuccess) return true;
  const char* text = nullptr;
  cuda_.GetErrorString(result, &text);
  last_error = std::string(what) + ": " + (text != nullptr ? text : "unknown error") + " (CUDA error " +
               std::to_string(result) + ")";
  return false;
}

bool Device::Open(int ordinal, ddl_device* out) {
  int driver = 0;
  char name[64] = "";
  if (!Check(cuda_.Init(0), "cuInit") || !Check(cuda_.DriverGetVersion(&driver), "cuDriverGetVersion") ||
      !Check(cuda_.DeviceGet(&device_, ordinal), "cuDeviceGet") ||
      !Check(cuda_.DeviceGetName(name, sizeof name, device_), "cuDeviceGetName")) {
    return false;
  }
  CudaUuid uuid;
  if (!Check(cuda_.DeviceGetUuid(&uuid, device_), "cuDeviceGetUuid") ||
      !Check(cuda_.PrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain")) {
    return false;
  }
  std::memcpy(out->uuid, uuid.bytes, sizeof out->uuid);
  out->location = {DDL_CUDA, ordinal};
  int version = 0;
  if (nccl_ != nullptr) nccl_->GetVersion(&version);
  // Later versions of NCCL take several ranks on one device if its user asks for that; earlier ones fail to connect.
  const char* const shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  out->library_shares = shares != nullptr && std::strcmp(shares, "1") == 0 ? 1 : 0;
  std::snprintf(out->name, sizeof out->name, "cuda:%d (%.40s, CUDA %d.%d%s%s)", ordinal, name, driver / 1000,
                driver % 1000 / 10, nccl_ != nullptr ? ", NCCL " : "",
                nccl_ != nullptr ? std::to_string(version).c_str() : "");
  const Current current(*this);
  if (!current) return false;
  for (CudaStream& stream : streams_) {
    if (!Check(cuda_.StreamCreate(&stream, kStreamNonBlocking), "cuStreamCreate")) return false;
  }
  return true;
}

Device::~Device() {
  if (context_ == nullptr) return;
  {
    const Current current(*this);
    if (group_ != nullptr) group_->Disconnect(true);
    for (const CudaEvent event : events_) cuda_.EventDestroy(event);
    for (const CudaStream stream : streams_) {
      if (stream != nullptr) cuda_.StreamDestroy(stream);
    }
    pool_.Clear();
  }
  cuda_.PrimaryCtxRelease(device_);
}

CudaEvent Device::TakeEvent() {
  {
    const std::lock_guard<std::mutex> lock(events_mutex_);
    if (!events_.empty()) {
      const CudaEvent event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  CudaEvent event = nullptr;
  return Check(cuda_.EventCreate(&event, kEventDisableTiming), "cuEventCreate") ? event : nullptr;
}

void Device::GiveBackEvent(CudaEvent event) {
  const std::lock_guard<std::mutex> lock(events_mutex_);
  events_.push_back(event);
}

CudaEvent Device::Record(CudaStream stream) {
  const CudaEvent event = TakeEvent();
  if (event == nullptr || Check(cuda_.EventRecord(event, stream), "cuEventRecord")) return event;
  GiveBackEvent(event);
  return nullptr;
}

bool Device::WaitFor(CudaStream stream, CudaEvent after) {
  return after == nullptr || Check(cuda_.StreamWaitEvent(stream, after, 0), "cuStreamWaitEvent");
}

bool Device::Copy(bool to_host, CudaEvent after, const ddl_device_copy* copies, uint32_t num_copies, CudaEvent* event) {
  const std::lock_guard<std::mutex> lock(copying_[to_host ? 0 : 1]);
  const CudaStream stream = streams_[to_host ? 0 : 1];
  if (!WaitFor(stream, after)) return false;
  for (uint32_t i = 0; i < num_copies; ++i) {
    const ddl_device_copy& copy = copies[i];
    const int result =
        to_host ? cuda_.MemcpyDtoHAsync(copy.to, reinterpret_cast<CudaPointer>(copy.from), copy.bytes, stream)
                : cuda_.MemcpyHtoDAsync(reinterpret_cast<CudaPointer>(copy.to), copy.from, copy.bytes, stream);
    if (!Check(result, to_host ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync")) return false;
  }
  *event = Record(stream);
  return *event != nullptr;
}

// ---- the table. Runs `work`, which returns whether it succeeded, with the device's context.
template <typename Work>
int Run(void* self, Work work) {
  Device& device = *static_cast<Device*>(self);
  try {
    const Current current(device);
    return current && work(device) ? DDL_OK : DDL_INTERNAL;
  } catch (const std::exception&) {  // of the standard library, where memory is short
    last_error.clear();
    return DDL_INTERNAL;
  }
}

int Reserve(void* self, uint64_t bytes, void** memory) {
  return Run(self, [&](Device& device) {
    *memory = device.pool().Take(bytes);
    if (*memory == nullptr) last_error = "no memory for " + std::to_string(bytes) + " bytes";
    return *memory != nullptr;
  });
}

void Release(void* self, void* memory) {
  (void)Run(self, [&](Device& device) {
    device.pool().GiveBack(memory);
    return true;
  });
}

int Mark(void* self, void* stream, void** event) {
  return Run(self, [&](Device& device) {
    *event = device.Record(static_cast<CudaStream>(stream));
    return *event != nullptr;
  });
}

int Test(void* self, void* event, int* done) {
  return Run(self, [&](Device& device) {
    const int result = device.cuda().EventQuery(static_cast<CudaEvent>(event));
    *done = result == kCudaSuccess ? 1 : 0;
    return result == kCudaNotReady || device.Check(result, "cuEventQuery");
  });
}

void Forget(void* self, void* event) {
  (void)Run(self, [&](Device& device) {
    device.GiveBackEvent(static_cast<CudaEvent>(event));
    return true;
  });
}

int Copy(void* self, int to_host, void* after, const ddl_device_copy* copies, uint32_t num_copies, void** event) {
  return Run(self, [&](Device& device) {
    CudaEvent made = nullptr;
    const bool begun = device.Copy(to_host != 0, static_cast<CudaEvent>(after), copies, num_copies, &made);
    *event = made;
    return begun;
  });
}

int MakeId(void* self, void* id) {
  return Run(self, [&](Device& device) {
    NcclId made;
    const int result = device.nccl()->GetUniqueId(&made);
    if (result != kNcclSuccess) last_error = std::string("ncclGetUniqueId: ") + device.nccl()->GetErrorString(result);
    std::memcpy(id, &made, sizeof made);
    return result == kNcclSuccess;
  });
}

int Connect(void* self, const void* id, int rank, int size) {
  return Run(self, [&](Device& device) { return device.group().Connect(id, rank, size, &last_error); });
}

int RunCollective(void* self, const ddl_device_collective* collective, void* after) {
  return Run(self, [&](Device& device) {
    const CudaStream stream = device.stream_of_library();
    return device.WaitFor(stream, static_cast<CudaEvent>(after)) &&
           device.group().Run(*collective, stream, &last_error);
  });
}

int Poll(void* self, int* ready) {
  return Run(self, [&](Device& device) {
    bool is_ready = false;
    const bool well = device.group().Poll(&is_ready, &last_error);
    *ready = is_ready ? 1 : 0;
    return well;
  });
}

int Finish(void* self, void** event) { return Mark(self, static_cast<Device*>(self)->stream_of_library(), event); }

void Disconnect(void* self, int abort) {
  (void)Run(self, [&](Device& device) {
    device.group().Disconnect(abort != 0);
    return true;
  });
}

const char* LastError(void*) { return last_error.c_str(); }
void Destroy(void* self) { delete static_cast<Device*>(self); }

}  // namespace
}  // namespace ddl_cuda

int ddl_cuda_open(int ordinal, int library, ddl_device* out, char* error, size_t error_bytes) {
  using namespace ddl_cuda;  // NOLINT: this is its only function outside
  try {
    std::string missing;
    const CudaFunctions* const cuda = Cuda(&missing);
    if (cuda == nullptr) {
      std::snprintf(error, error_bytes, "CUDA's driver is not there: %s", missing.c_str());
      return DDL_UNAVAILABLE;
    }
    const NcclFunctions* const nccl = library != 0 ? Nccl(&missing) : nullptr;
    auto device = std::make_unique<Device>(*cuda, nccl);
    *out = {};
    if (!device->Open(ordinal, out)) {
      std::snprintf(error, error_bytes, "cuda:%d cannot be used: %s", ordinal, last_error.c_str());
      return DDL_UNAVAILABLE;
    }
    out->abi_version = DDL_ABI_VERSION;
    out->reserve = Reserve;
    out->release = Release;
    out->mark = Mark;
    out->test = Test;
    out->forget = Forget;
    out->copy = Copy;
    if (nccl != nullptr) {
      out->make_id = MakeId;
      out->connect = Connect;
      out->run = RunCollective;
      out->poll = Poll;
      out->finish = Finish;
      out->disconnect = Disconnect;
    }
    out->last_error = LastError;
    out->destroy = Destroy;
    out->self = device.release();
    return DDL_OK;
  } catch (const std::exception& failure) {
    std::snprintf(error, error_bytes, "cuda:%d cannot be used: %s", ordinal, failure.what());
    return DDL_INTERNAL;
  }
}
