// A stand-in for libcuda.so.1: the functions that native/cuda and its tests call, with host memory and host threads.
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
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

std::mutex mutex;  // guards the variables below
std::map<std::string, std::pair<int, int>> failures;
std::map<std::string, int64_t> counts;
std::map<char*, size_t> registered;
std::multimap<size_t, char*> free_memory;
std::map<char*, size_t> allocated;
size_t used = 0;
bool stalled = false;
std::condition_variable unstalled;

void Count(const char* what, int64_t change) {
  const std::lock_guard<std::mutex> lock(mutex);
  counts[what] += change;
}

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

thread_local std::vector<int> contexts;

// Fails on request, and if the thread has no context.
int Enter(const char* function, bool needs_context = true) {
  if (stand_in_fails(function)) return kInjected;
  return needs_context && contexts.empty() ? kInvalidContext : kSuccess;
}

#define RETURN_IF_FAILED(expression)                                 \
  do {                                                               \
    if (const int failed = (expression); failed != 0) return failed; \
  } while (false)

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, completed = 0;
};

}  // namespace

struct CUevent_st {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

// Runs its tasks in order on a thread, each with a delay.
struct CUstream_st {
  CUstream_st() : thread([this] { Run(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard<std::mutex> lock(queue_mutex);
      closing = true;
    }
    changed.notify_all();
    thread.join();
  }
  void Push(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
  }
  void Synchronize() {
    std::unique_lock<std::mutex> lock(queue_mutex);
    changed.wait(lock, [this] { return tasks.empty() && !busy; });
  }
  void Run() {
    std::unique_lock<std::mutex> lock(queue_mutex);
    for (;;) {
      changed.wait(lock, [this] { return closing || !tasks.empty(); });
      if (tasks.empty()) return;
      const std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
      lock.unlock();
      task();
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }

  std::mutex queue_mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool busy = false, closing = false;
  std::thread thread;  // last, because it uses the other members
};

namespace {

CUstream_st& Default() {
  static CUstream_st stream;
  return stream;
}
CUstream_st& Of(CUstream_st* stream) { return stream != nullptr ? *stream : Default(); }

int Copy(const char* function, char* device, char* host, size_t bytes, bool to_host, CUstream_st* stream) {
  RETURN_IF_FAILED(Enter(function));
  if (!IsDeviceRange(device, bytes) || IsDeviceRange(host, bytes)) return kInvalidValue;
  bool pageable = true;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto after = registered.upper_bound(host);
    if (after != registered.begin()) {
      const auto at = std::prev(after);
      pageable = host + bytes > at->first + at->second;
    }
  }
  if (pageable) Count("pageable", 1);
  Of(stream).Push([=] {
    stand_in_delay();
    {
      std::unique_lock<std::mutex> lock(mutex);
      unstalled.wait(lock, [] { return !stalled; });
    }
    char* const memory = device + kMemory;
    std::memcpy(to_host ? host : memory, to_host ? memory : host, bytes);
  });
  return kSuccess;
}

}  // namespace

extern "C" {

void stand_in_fail(const char* function, int after, int times) {
  const std::lock_guard<std::mutex> lock(mutex);
  failures[function] = {after, times};
}

void stand_in_heal() {
  const std::lock_guard<std::mutex> lock(mutex);
  failures.clear();
}

bool stand_in_fails(const char* function) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = failures.find(function);
  if (at == failures.end()) return false;
  auto& [after, times] = at->second;
  if (after > 0) {
    --after;
    return false;
  }
  if (times > 0) --times;
  if (times == 0) failures.erase(at);
  return true;
}

int64_t stand_in_count(const char* what) {
  const std::lock_guard<std::mutex> lock(mutex);
  return counts[what];
}

void stand_in_stall(bool stall) {
  const std::lock_guard<std::mutex> lock(mutex);
  stalled = stall;
  unstalled.notify_all();
}

void stand_in_enqueue(void* stream, void (*task)(void*), void* data) {
  Of(static_cast<CUstream_st*>(stream)).Push([task, data] { task(data); });
}

void* stand_in_memory(const void* device_pointer) {
  return const_cast<char*>(static_cast<const char*>(device_pointer)) + kMemory;
}

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
  Count("contexts", 1);
  return kSuccess;
}
DDL_EXPORT int cuDevicePrimaryCtxRelease_v2(int) {
  Count("contexts", -1);
  return kSuccess;
}
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
  Count("streams", 1);
  return kSuccess;
}
DDL_EXPORT int cuStreamDestroy_v2(CUstream_st* stream) {
  delete stream;
  Count("streams", -1);
  return kSuccess;
}
DDL_EXPORT int cuStreamSynchronize(CUstream_st* stream) {
  Of(stream).Synchronize();
  return kSuccess;
}
DDL_EXPORT int cuStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned) {
  RETURN_IF_FAILED(Enter("cuStreamWaitEvent"));
  Count("waits", 1);
  const std::shared_ptr<EventState> state = event->state;
  uint64_t recorded = 0;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    recorded = state->recorded;
  }
  Of(stream).Push([state, recorded] {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->changed.wait(lock, [&] { return state->completed >= recorded; });
  });
  return kSuccess;
}
DDL_EXPORT int cuEventCreate(CUevent_st** event, unsigned) {
  RETURN_IF_FAILED(Enter("cuEventCreate"));
  *event = new CUevent_st;
  Count("events", 1);
  return kSuccess;
}
DDL_EXPORT int cuEventDestroy_v2(CUevent_st* event) {
  delete event;
  Count("events", -1);
  return kSuccess;
}
DDL_EXPORT int cuEventRecord(CUevent_st* event, CUstream_st* stream) {
  RETURN_IF_FAILED(Enter("cuEventRecord"));
  const std::shared_ptr<EventState> state = event->state;
  uint64_t recorded = 0;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    recorded = ++state->recorded;
  }
  Of(stream).Push([state, recorded] {
    const std::lock_guard<std::mutex> lock(state->mutex);
    if (recorded > state->completed) state->completed = recorded;
    state->changed.notify_all();
  });
  return kSuccess;
}
DDL_EXPORT int cuEventQuery(CUevent_st* event) {
  RETURN_IF_FAILED(Enter("cuEventQuery"));
  const std::lock_guard<std::mutex> lock(event->state->mutex);
  return event->state->completed >= event->state->recorded ? kSuccess : kNotReady;
}
DDL_EXPORT int cuMemcpyDtoHAsync_v2(void* host, char* device, size_t bytes, CUstream_st* stream) {
  return Copy("cuMemcpyDtoHAsync_v2", device, static_cast<char*>(host), bytes, true, stream);
}
DDL_EXPORT int cuMemcpyHtoDAsync_v2(char* device, const void* host, size_t bytes, CUstream_st* stream) {
  char* const from = const_cast<char*>(static_cast<const char*>(host));
  return Copy("cuMemcpyHtoDAsync_v2", device, from, bytes, false, stream);
}
DDL_EXPORT int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
  RETURN_IF_FAILED(Enter("cuMemHostRegister_v2"));
  const std::lock_guard<std::mutex> lock(mutex);
  registered[static_cast<char*>(memory)] = bytes;
  ++counts["registered"];
  return kSuccess;
}
DDL_EXPORT int cuMemHostUnregister(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (registered.erase(static_cast<char*>(memory)) == 0) return kInvalidValue;
  --counts["registered"];
  return kSuccess;
}
DDL_EXPORT int cuMemAlloc_v2(char** device, size_t bytes) {
  RETURN_IF_FAILED(Enter("cuMemAlloc_v2"));
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = free_memory.find(rounded);
  if (at != free_memory.end()) {
    *device = at->second;
    free_memory.erase(at);
  } else {
    if (used + rounded > kMemory) return kOutOfMemory;
    *device = Base() + used;
    used += rounded;
  }
  std::memset(*device + kMemory, 0xee, rounded);
  allocated[*device] = rounded;
  ++counts["allocations"];
  return kSuccess;
}
DDL_EXPORT int cuMemFree_v2(char* device) {
  const std::lock_guard<std::mutex> lock(mutex);
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
