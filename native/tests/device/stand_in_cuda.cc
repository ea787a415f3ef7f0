// A stand-in for libcuda.so.1: the functions that native/cuda and its tests call, with host memory and host threads.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "device/stand_in.h"

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidContext = 201,
              kNotReady = 600, kInjected = 719;
constexpr int kDevices = 8;
constexpr size_t kMemory = size_t{512} << 20;
constexpr size_t kAlignment = 512;

using Lock = std::unique_lock<std::mutex>;
std::mutex mutex;                 // guards everything here, events and streams included
std::condition_variable changed;  // an event has completed, or copies may go on
std::map<std::string, bool> failures;
std::map<std::string, int64_t> counts;
std::map<char*, size_t> registered, allocated;
std::multimap<size_t, char*> free_memory;
size_t used = 0;
bool stalled = false;
thread_local std::vector<int> contexts;

// Device pointers, which nothing can read; the memory behind them is at a distance of kMemory.
char* Base() {
  static char* const base = [] {
    void* const both = mmap(nullptr, 2 * kMemory, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (both == MAP_FAILED) abort();
    if (mprotect(static_cast<char*>(both) + kMemory, kMemory, PROT_READ | PROT_WRITE) != 0) abort();
    return static_cast<char*>(both);
  }();
  return base;
}

bool IsDeviceRange(const char* begin, size_t bytes) { return begin >= Base() && begin + bytes <= Base() + kMemory; }

// Counts one more or less of `what`, and returns success.
int Count(const char* what, int64_t change) {
  const Lock lock(mutex);
  counts[what] += change;
  return kSuccess;
}

// Fails on request, and if the thread has no context.
int Enter(const char* function, bool needs_context = true) {
  if (stand_in_fails(function)) return kInjected;
  return needs_context && contexts.empty() ? kInvalidContext : kSuccess;
}
#define RETURN_IF_FAILED(expression)                                 \
  do {                                                               \
    if (const int failed = (expression); failed != 0) return failed; \
  } while (false)

}  // namespace

struct CUevent_st {
  uint64_t recorded = 0, completed = 0;
};

// Runs its tasks in order on a thread.
struct CUstream_st {
  CUstream_st() : thread([this] { Run(); }) {}
  ~CUstream_st() {
    Push(nullptr);
    thread.join();
  }
  void Push(std::function<void()> task) {
    const Lock lock(mutex);
    tasks.push_back(std::move(task));
    pushed.notify_one();
  }
  void Synchronize() {
    Lock lock(mutex);
    idle.wait(lock, [this] { return tasks.empty(); });
  }
  void Run() {
    for (Lock lock(mutex);;) {
      pushed.wait(lock, [this] { return !tasks.empty(); });
      const std::function<void()>& task = tasks.front();  // stays there while others are pushed
      if (task == nullptr) return;
      lock.unlock();
      task();
      lock.lock();
      tasks.pop_front();
      if (tasks.empty()) idle.notify_all();
    }
  }

  std::condition_variable pushed, idle;
  std::deque<std::function<void()>> tasks;  // the first one is running
  std::thread thread;                       // last, because it uses the other members
};

namespace {

CUstream_st& Of(void* stream) {
  static CUstream_st default_stream;
  return stream != nullptr ? *static_cast<CUstream_st*>(stream) : default_stream;
}

int Copy(const char* function, char* device, char* host, size_t bytes, bool to_host, CUstream_st* stream) {
  RETURN_IF_FAILED(Enter(function));
  if (!IsDeviceRange(device, bytes) || IsDeviceRange(host, bytes)) return kInvalidValue;
  {
    const Lock lock(mutex);
    const auto after = registered.upper_bound(host);
    const bool locked =
        after != registered.begin() && host + bytes <= std::prev(after)->first + std::prev(after)->second;
    counts["pageable"] += locked ? 0 : 1;
  }
  Of(stream).Push([=] {
    stand_in_delay();
    {
      Lock lock(mutex);
      changed.wait(lock, [] { return !stalled; });
    }
    char* const memory = stand_in_memory(device);
    std::memcpy(to_host ? host : memory, to_host ? memory : host, bytes);
  });
  return kSuccess;
}

}  // namespace

void stand_in_enqueue(void* stream, std::function<void()> task) { Of(stream).Push(std::move(task)); }

extern "C" {

void stand_in_fail(const char* function, bool always) {
  const Lock lock(mutex);
  failures[function] = always;
}
void stand_in_heal() {
  const Lock lock(mutex);
  failures.clear();
}
bool stand_in_fails(const char* function) {
  const Lock lock(mutex);
  const auto at = failures.find(function);
  if (at == failures.end()) return false;
  if (!at->second) failures.erase(at);
  return true;
}
int64_t stand_in_count(const char* what) {
  const Lock lock(mutex);
  return counts[what];
}
void stand_in_stall(bool stall) {
  const Lock lock(mutex);
  stalled = stall;
  changed.notify_all();
}
char* stand_in_memory(const void* device) { return const_cast<char*>(static_cast<const char*>(device)) + kMemory; }
void stand_in_delay() {
  thread_local std::minstd_rand random(static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
  if (random() % 2 == 0) usleep(random() % 1000);
}
int stand_in_current_device() { return contexts.empty() ? -1 : contexts.back(); }

DDL_EXPORT int cuInit(unsigned) { return Enter("cuInit", false); }
DDL_EXPORT int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
DDL_EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < kDevices ? kSuccess : kInvalidDevice;
}
DDL_EXPORT int cuDeviceGetName(char* name, int bytes, int) {
  std::snprintf(name, static_cast<size_t>(bytes), "stand-in");
  return kSuccess;
}
DDL_EXPORT int cuDeviceGetUuid_v2(char* uuid, int device) {
  std::memset(uuid, 0, 16);
  uuid[0] = static_cast<char>(device + 1);
  return kSuccess;
}
DDL_EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  RETURN_IF_FAILED(Enter("cuDevicePrimaryCtxRetain", false));
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
  return Count("contexts", 1);
}
DDL_EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return Count("contexts", -1); }
DDL_EXPORT int cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
  return kSuccess;
}
DDL_EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = nullptr;
  contexts.pop_back();
  return kSuccess;
}
DDL_EXPORT int cuStreamCreate(CUstream_st** stream, unsigned) {
  RETURN_IF_FAILED(Enter("cuStreamCreate"));
  *stream = new CUstream_st;
  return Count("streams", 1);
}
DDL_EXPORT int cuStreamDestroy_v2(CUstream_st* stream) {
  delete stream;
  return Count("streams", -1);
}
DDL_EXPORT int cuStreamSynchronize(CUstream_st* stream) {
  Of(stream).Synchronize();
  return kSuccess;
}
DDL_EXPORT int cuStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned) {
  RETURN_IF_FAILED(Enter("cuStreamWaitEvent"));
  Lock lock(mutex);
  const uint64_t recorded = event->recorded;
  lock.unlock();
  Of(stream).Push([event, recorded] {
    Lock waiting(mutex);
    changed.wait(waiting, [&] { return event->completed >= recorded; });
  });
  return kSuccess;
}
DDL_EXPORT int cuEventCreate(CUevent_st** event, unsigned) {
  RETURN_IF_FAILED(Enter("cuEventCreate"));
  // Never freed: a stream's task may still use an event that the caller has destroyed.
  static auto* const events = new std::deque<CUevent_st>;
  {
    const Lock lock(mutex);
    *event = &events->emplace_back();
  }
  return Count("events", 1);
}
DDL_EXPORT int cuEventDestroy_v2(CUevent_st*) { return Count("events", -1); }
DDL_EXPORT int cuEventRecord(CUevent_st* event, CUstream_st* stream) {
  RETURN_IF_FAILED(Enter("cuEventRecord"));
  Lock lock(mutex);
  const uint64_t recorded = ++event->recorded;
  lock.unlock();
  Of(stream).Push([event, recorded] {
    const Lock done(mutex);
    event->completed = std::max(event->completed, recorded);
    changed.notify_all();
  });
  return kSuccess;
}
DDL_EXPORT int cuEventQuery(CUevent_st* event) {
  RETURN_IF_FAILED(Enter("cuEventQuery"));
  const Lock lock(mutex);
  return event->completed >= event->recorded ? kSuccess : kNotReady;
}
DDL_EXPORT int cuMemcpyDtoHAsync_v2(void* host, char* device, size_t bytes, CUstream_st* stream) {
  return Copy("cuMemcpyDtoHAsync_v2", device, static_cast<char*>(host), bytes, true, stream);
}
DDL_EXPORT int cuMemcpyHtoDAsync_v2(char* device, void* host, size_t bytes, CUstream_st* stream) {
  return Copy("cuMemcpyHtoDAsync_v2", device, static_cast<char*>(host), bytes, false, stream);
}
DDL_EXPORT int cuMemHostRegister_v2(char* memory, size_t bytes, unsigned) {
  RETURN_IF_FAILED(Enter("cuMemHostRegister_v2"));
  const Lock lock(mutex);
  registered[memory] = bytes;
  ++counts["registered"];
  return kSuccess;
}
DDL_EXPORT int cuMemHostUnregister(char* memory) {
  const Lock lock(mutex);
  counts["registered"] -= static_cast<int64_t>(registered.erase(memory));
  return kSuccess;
}
DDL_EXPORT int cuMemAlloc_v2(char** device, size_t bytes) {
  RETURN_IF_FAILED(Enter("cuMemAlloc_v2"));
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  const Lock lock(mutex);
  if (const auto at = free_memory.find(rounded); at != free_memory.end()) {
    *device = at->second;
    free_memory.erase(at);
  } else {
    if (used + rounded > kMemory) return kOutOfMemory;
    *device = Base() + used;
    used += rounded;
  }
  std::memset(stand_in_memory(*device), 0xee, rounded);
  allocated[*device] = rounded;
  ++counts["allocations"];
  return kSuccess;
}
DDL_EXPORT int cuMemFree_v2(char* device) {
  const Lock lock(mutex);
  const auto at = allocated.find(device);
  if (at == allocated.end()) return kInvalidValue;
  free_memory.emplace(at->second, device);
  allocated.erase(at);
  --counts["allocations"];
  return kSuccess;
}
DDL_EXPORT int cuGetErrorString(int error, const char** text) {
  *text = error == kInjected ? "injected by a test" : error == kInvalidContext ? "invalid context" : "an error";
  return kSuccess;
}

}  // extern "C"
