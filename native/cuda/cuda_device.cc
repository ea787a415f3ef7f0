// A CUDA device behind the table of ddl_device.h. It has three streams: copies to the host, copies from it, and NCCL's.
#include <array>
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
  Device(const CudaFunctions& cuda, const NcclFunctions* nccl)
      : cuda_(cuda), nccl_(nccl), pool_(cuda), groups_{NcclGroup(nccl), NcclGroup(nccl)} {}
  ~Device();
  // Fills in what the table says of the device.
  bool Open(int ordinal, ddl_device* out);

  // The table's functions, with the device's context. False: failed, with last_error.
  bool Reserve(uint64_t bytes, void** memory);
  bool Release(void* memory);
  bool Mark(void* stream, void** event);
  bool Test(void* event, int* done);
  bool Forget(void* event);
  bool Copy(int to_host, void* after, const ddl_device_copy* copies, uint32_t num_copies, void** event);
  bool MakeId(void* id);
  bool Connect(int group, const void* id, int rank, int size);
  bool Run(int group, const ddl_device_collective* collective, void* after);
  bool Poll(int group, int* ready);
  bool Finish(void** event) { return Mark(streams_[kLibrary], event); }
  bool Disconnect(int group, int abort);

  // Keeps the device's context current on this thread during its lifetime.
  class Current {
   public:
    explicit Current(const Device& device) : device_(device) {
      entered_ =
          device.context_ != nullptr && device.Check(device.cuda_.CtxPushCurrent(device.context_), "its context");
    }
    ~Current() {
      CudaContext ignored = nullptr;
      if (entered_) device_.cuda_.CtxPopCurrent(&ignored);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    explicit operator bool() const { return entered_; }

   private:
    const Device& device_;
    bool entered_ = false;
  };

 private:
  enum Stream { kToHost, kFromHost, kLibrary, kNumStreams };
  bool Check(int result, const char* what) const;
  bool WaitFor(CudaStream stream, void* after) {
    return after == nullptr ||
           Check(cuda_.StreamWaitEvent(stream, static_cast<CudaEvent>(after), 0), "cuStreamWaitEvent");
  }

  const CudaFunctions& cuda_;
  const NcclFunctions* const nccl_;
  CudaDevice device_ = 0;
  CudaContext context_ = nullptr;
  CudaStream streams_[kNumStreams] = {};
  PinnedPool pool_;
  std::array<NcclGroup, DDL_NUM_DEVICE_GROUPS> groups_;
  std::mutex copying_[2];  // by direction: a copy's wait, pieces and event come together
  std::mutex events_mutex_;
  std::vector<CudaEvent> events_;  // free ones
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
  CudaUuid uuid;
  if (!Check(cuda_.Init(0), "cuInit") || !Check(cuda_.DriverGetVersion(&driver), "cuDriverGetVersion") ||
      !Check(cuda_.DeviceGet(&device_, ordinal), "cuDeviceGet") ||
      !Check(cuda_.DeviceGetName(name, sizeof name, device_), "cuDeviceGetName") ||
      !Check(cuda_.DeviceGetUuid(&uuid, device_), "cuDeviceGetUuid") ||
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
    for (NcclGroup& group : groups_) group.Disconnect(true);
    for (const CudaEvent event : events_) cuda_.EventDestroy(event);
    for (const CudaStream stream : streams_) {
      if (stream != nullptr) cuda_.StreamDestroy(stream);
    }
    pool_.Clear();
  }
  cuda_.PrimaryCtxRelease(device_);
}

bool Device::Reserve(uint64_t bytes, void** memory) {
  *memory = pool_.Take(bytes);
  if (*memory == nullptr) last_error = "no memory for " + std::to_string(bytes) + " bytes";
  return *memory != nullptr;
}

bool Device::Release(void* memory) {
  pool_.GiveBack(memory);
  return true;
}

bool Device::Mark(void* stream, void** event) {
  CudaEvent made = nullptr;
  {
    const std::lock_guard<std::mutex> lock(events_mutex_);
    if (!events_.empty()) {
      made = events_.back();
      events_.pop_back();
    }
  }
  if (made == nullptr && !Check(cuda_.EventCreate(&made, kEventDisableTiming), "cuEventCreate")) return false;
  if (Check(cuda_.EventRecord(made, static_cast<CudaStream>(stream)), "cuEventRecord")) {
    *event = made;
    return true;
  }
  Forget(made);
  return false;
}

bool Device::Test(void* event, int* done) {
  const int result = cuda_.EventQuery(static_cast<CudaEvent>(event));
  *done = result == kCudaSuccess ? 1 : 0;
  return result == kCudaNotReady || Check(result, "cuEventQuery");
}

bool Device::Forget(void* event) {
  const std::lock_guard<std::mutex> lock(events_mutex_);
  events_.push_back(static_cast<CudaEvent>(event));
  return true;
}

bool Device::Copy(int to_host, void* after, const ddl_device_copy* copies, uint32_t num_copies, void** event) {
  const Stream way = to_host != 0 ? kToHost : kFromHost;
  const std::lock_guard<std::mutex> lock(copying_[way]);
  if (!WaitFor(streams_[way], after)) return false;
  for (const ddl_device_copy* copy = copies; copy < copies + num_copies; ++copy) {
    const int result =
        to_host != 0
            ? cuda_.MemcpyDtoHAsync(copy->to, reinterpret_cast<CudaPointer>(copy->from), copy->bytes, streams_[way])
            : cuda_.MemcpyHtoDAsync(reinterpret_cast<CudaPointer>(copy->to), copy->from, copy->bytes, streams_[way]);
    if (!Check(result, to_host != 0 ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync")) return false;
  }
  return Mark(streams_[way], event);
}

bool Device::MakeId(void* id) { return NcclGroup::MakeId(*nccl_, id, &last_error); }
bool Device::Connect(int group, const void* id, int rank, int size) {
  return groups_[group].Connect(id, rank, size, &last_error);
}
bool Device::Run(int group, const ddl_device_collective* collective, void* after) {
  return WaitFor(streams_[kLibrary], after) && groups_[group].Run(*collective, streams_[kLibrary], &last_error);
}
bool Device::Poll(int group, int* ready) { return groups_[group].Poll(ready, &last_error); }
bool Device::Disconnect(int group, int abort) {
  groups_[group].Disconnect(abort != 0);
  return true;
}

// ---- the table's functions
template <auto kMethod, typename... Args>
int Call(void* self, Args... args) {
  Device& device = *static_cast<Device*>(self);
  try {
    const Device::Current current(device);
    return current && (device.*kMethod)(args...) ? DDL_OK : DDL_INTERNAL;
  } catch (const std::exception&) {  // of the standard library, where memory is short
    last_error.clear();
    return DDL_INTERNAL;
  }
}
template <auto kMethod, typename... Args>
void Do(void* self, Args... args) {
  (void)Call<kMethod, Args...>(self, args...);
}

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
    out->reserve = Call<&Device::Reserve>;
    out->release = Do<&Device::Release>;
    out->mark = Call<&Device::Mark>;
    out->test = Call<&Device::Test>;
    out->forget = Do<&Device::Forget>;
    out->copy = Call<&Device::Copy>;
    if (nccl != nullptr) {
      out->make_id = Call<&Device::MakeId>;
      out->connect = Call<&Device::Connect>;
      out->run = Call<&Device::Run>;
      out->poll = Call<&Device::Poll>;
      out->finish = Call<&Device::Finish>;
      out->disconnect = Do<&Device::Disconnect>;
    }
    out->last_error = [](void*) { return last_error.c_str(); };
    out->destroy = [](void* self) { delete static_cast<Device*>(self); };
    out->self = device.release();
    return DDL_OK;
  } catch (const std::exception& failure) {
    std::snprintf(error, error_bytes, "cuda:%d cannot be used: %s", ordinal, failure.what());
    return DDL_INTERNAL;
  }
}
