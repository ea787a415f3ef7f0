// device.cc: the software GPU, a TensorFlow device made of threads, for tests on machines without a GPU.
//
// TensorFlow sees a device of type "GPU" through the C interface of stream executors. Device pointers point to memory
// without access rights, so host code that uses one dies of SIGSEGV; the device's own memory is kDeviceBytes above. A
// stream is a thread with a queue. Copies and kernels run with a random delay after the call that enqueues them has
// returned, so code that does not wait for them reads wrong values.
//
// SOFTWARE_GPU_DEVICES: the number of devices, 2 unless set.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "software_gpu.h"

namespace software_gpu {
namespace {

constexpr size_t kDeviceBytes = size_t{1} << 30;
constexpr size_t kAlignment = 256;
constexpr unsigned kMaxDelayMicroseconds = 300;

size_t Aligned(uint64_t size) { return (std::max<size_t>(size, 1) + kAlignment - 1) & ~(kAlignment - 1); }

void Delay() {
  static thread_local uint32_t state = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(&state) >> 4) | 1;
  state = state * 1664525u + 1013904223u;
  std::this_thread::sleep_for(std::chrono::microseconds((state >> 8) % kMaxDelayMicroseconds));
}

// A point in a stream at which an event was recorded, and whether the stream has reached it.
class Moment {
 public:
  uint64_t Record() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++recorded_;
  }
  void Reach(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    reached_ = std::max(reached_, number);
    changed_.notify_all();
  }
  uint64_t Recorded() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }
  bool IsReached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_ >= recorded_;
  }
  void Wait(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= number; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0, reached_ = 0;
};

// Allocates device pointers.
class Device {
 public:
  Device() {
    void* all = mmap(nullptr, 2 * kDeviceBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) std::abort();
    char* base = static_cast<char*>(all);
    if (mprotect(base + kDeviceBytes, kDeviceBytes, PROT_READ | PROT_WRITE) != 0) std::abort();
    free_[base] = kDeviceBytes;
  }
  // Returns nullptr if no free block is large enough.
  void* Allocate(uint64_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto [start, length] : free_) {
      if (length < Aligned(size)) continue;
      free_.erase(start);
      if (length > Aligned(size)) free_[start + Aligned(size)] = length - Aligned(size);
      return start;
    }
    return nullptr;
  }
  void Free(void* pointer, uint64_t size) {
    Synchronize();  // like cudaFree
    std::lock_guard<std::mutex> lock(mutex_);
    auto at = free_.emplace(static_cast<char*>(pointer), Aligned(size)).first;
    JoinWithNext(at);
    if (at != free_.begin()) JoinWithNext(std::prev(at));
  }
  int64_t FreeBytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t sum = 0;
    for (auto [start, length] : free_) sum += static_cast<int64_t>(length);
    return sum;
  }
  void Add(SP_Stream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(stream);
  }
  void Remove(SP_Stream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.erase(std::remove(streams_.begin(), streams_.end(), stream), streams_.end());
  }
  // Waits for all work enqueued on any stream.
  void Synchronize();

 private:
  using FreeMap = std::map<char*, size_t>;
  void JoinWithNext(FreeMap::iterator at) {
    auto next = std::next(at);
    if (next == free_.end() || at->first + at->second != next->first) return;
    at->second += next->second;
    free_.erase(next);
  }

  std::mutex mutex_;
  FreeMap free_;
  std::vector<SP_Stream> streams_;
};

}  // namespace
}  // namespace software_gpu

struct SP_Event_st {
  std::shared_ptr<software_gpu::Moment> moment = std::make_shared<software_gpu::Moment>();
};

struct SP_Stream_st {
 public:
  ~SP_Stream_st() {
    Add(nullptr);
    thread_.join();
  }
  void Add(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  void Drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !is_busy_; });
  }
  void Record(const std::shared_ptr<software_gpu::Moment>& moment) {
    Add([moment, number = moment->Record()] { moment->Reach(number); });
  }
  void WaitFor(const std::shared_ptr<software_gpu::Moment>& moment) {
    Add([moment, number = moment->Recorded()] { moment->Wait(number); });
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      if (!work) return;
      is_busy_ = true;
      lock.unlock();
      work();
      work = nullptr;  // releases captured objects before the work counts as done
      lock.lock();
      is_busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // an empty function ends the thread
  bool is_busy_ = false;
  std::thread thread_{[this] { Run(); }};
};

namespace software_gpu {

char* MemoryOf(const void* pointer) { return const_cast<char*>(static_cast<const char*>(pointer)) + kDeviceBytes; }

void Launch(SP_Stream stream, std::function<void()> kernel) {
  stream->Add([kernel = std::move(kernel)] {
    Delay();
    kernel();
  });
}

namespace {

void Device::Synchronize() {
  std::vector<SP_Stream> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    streams = streams_;
  }
  for (SP_Stream stream : streams) stream->Drain();
}

Device* Of(const SP_Device* device) { return static_cast<Device*>(device->device_handle); }

void SetMemory(SP_StreamExecutor* se) {
  se->allocate = [](const SP_Device* device, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
    memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
    memory->opaque = Of(device)->Allocate(size);
    memory->size = memory->opaque == nullptr ? 0 : size;
  };
  se->deallocate = [](const SP_Device* device, SP_DeviceMemoryBase* memory) {
    if (memory->opaque != nullptr) Of(device)->Free(memory->opaque, memory->size);
  };
  se->host_memory_allocate = [](const SP_Device*, uint64_t size) {
    return std::aligned_alloc(kAlignment, Aligned(size));
  };
  se->host_memory_deallocate = [](const SP_Device*, void* memory) { std::free(memory); };
  se->get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return 0; };
  se->device_memory_usage = [](const SP_Device* device, int64_t* free, int64_t* total) -> TF_Bool {
    *free = Of(device)->FreeBytes();
    *total = static_cast<int64_t>(kDeviceBytes);
    return 1;
  };
}

void SetStreams(SP_StreamExecutor* se) {
  se->create_stream = [](const SP_Device* device, SP_Stream* stream, TF_Status*) {
    *stream = new SP_Stream_st;
    Of(device)->Add(*stream);
  };
  se->destroy_stream = [](const SP_Device* device, SP_Stream stream) {
    Of(device)->Remove(stream);
    delete stream;
  };
  se->create_stream_dependency = [](const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status*) {
    auto moment = std::make_shared<Moment>();
    other->Record(moment);
    dependent->WaitFor(moment);
  };
  se->get_stream_status = [](const SP_Device*, SP_Stream, TF_Status*) {};
  se->create_event = [](const SP_Device*, SP_Event* event, TF_Status*) { *event = new SP_Event_st; };
  se->destroy_event = [](const SP_Device*, SP_Event event) { delete event; };
  se->get_event_status = [](const SP_Device*, SP_Event event) {
    return event->moment->IsReached() ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
  };
  se->record_event = [](const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) {
    stream->Record(event->moment);
  };
  se->wait_for_event = [](const SP_Device* const, SP_Stream stream, SP_Event event, TF_Status* const) {
    stream->WaitFor(event->moment);
  };
  se->block_host_for_event = [](const SP_Device*, SP_Event event, TF_Status*) {
    event->moment->Wait(event->moment->Recorded());
  };
  se->block_host_until_done = [](const SP_Device*, SP_Stream stream, TF_Status*) { stream->Drain(); };
  se->synchronize_all_activity = [](const SP_Device* device, TF_Status*) { Of(device)->Synchronize(); };
  se->host_callback = [](const SP_Device*, SP_Stream stream, SE_StatusCallbackFn function, void* argument) -> TF_Bool {
    stream->Add([function, argument] {
      TF_Status* status = TF_NewStatus();
      function(argument, status);
      TF_DeleteStatus(status);
    });
    return 1;
  };
  // TensorFlow requires timers but does not read them here.
  se->create_timer = [](const SP_Device*, SP_Timer* timer, TF_Status*) { *timer = nullptr; };
  se->destroy_timer = [](const SP_Device*, SP_Timer) {};
  se->start_timer = se->stop_timer = [](const SP_Device*, SP_Stream, SP_Timer, TF_Status*) {};
}

void CopyLater(SP_Stream stream, void* to, const void* from, uint64_t size) {
  Launch(stream, [=] { std::memcpy(to, from, size); });
}

void SetCopies(SP_StreamExecutor* se) {
  se->memcpy_dtoh = [](const SP_Device*, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
                       TF_Status*) { CopyLater(stream, to, MemoryOf(from->opaque), size); };
  se->memcpy_htod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
                       TF_Status*) { CopyLater(stream, MemoryOf(to->opaque), from, size); };
  se->memcpy_dtod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                       uint64_t size,
                       TF_Status*) { CopyLater(stream, MemoryOf(to->opaque), MemoryOf(from->opaque), size); };
  se->sync_memcpy_dtoh = [](const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t size, TF_Status*) {
    std::memcpy(to, MemoryOf(from->opaque), size);
  };
  se->sync_memcpy_htod = [](const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t size, TF_Status*) {
    std::memcpy(MemoryOf(to->opaque), from, size);
  };
  se->sync_memcpy_dtod = [](const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, uint64_t size,
                            TF_Status*) { std::memcpy(MemoryOf(to->opaque), MemoryOf(from->opaque), size); };
  se->mem_zero = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint64_t size, TF_Status*) {
    Launch(stream, [memory = MemoryOf(at->opaque), size] { std::memset(memory, 0, size); });
  };
  se->memset = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint8_t byte, uint64_t size,
                  TF_Status*) {
    Launch(stream, [memory = MemoryOf(at->opaque), byte, size] { std::memset(memory, byte, size); });
  };
  se->memset32 = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint32_t word, uint64_t size,
                    TF_Status*) {
    uint32_t* memory = reinterpret_cast<uint32_t*>(MemoryOf(at->opaque));
    Launch(stream, [=] { std::fill_n(memory, size / sizeof word, word); });
  };
}

void SetPlatform(SP_PlatformFns* fns) {
  fns->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  fns->get_device_count = [](const SP_Platform*, int* count, TF_Status*) {
    const char* text = std::getenv("SOFTWARE_GPU_DEVICES");
    *count = text == nullptr ? 2 : std::stoi(text);
  };
  fns->create_device = [](const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
    params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    params->device->ordinal = params->ordinal;
    params->device->hardware_name = "software GPU";
    params->device->device_vendor = "keras_ddl's tests";
    params->device->device_handle = new Device;  // never freed: streams outlive main
  };
  fns->destroy_device = [](const SP_Platform*, SP_Device*) {};
  fns->create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status*) {
    SP_DeviceFns* of_device = params->device_fns;
    of_device->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
    of_device->get_numa_node = [](const SP_Device*) { return int32_t{0}; };
    of_device->get_memory_bandwidth = [](const SP_Device*) { return int64_t{-1}; };
    of_device->get_gflops = [](const SP_Device*) { return -1.0; };
  };
  fns->destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  fns->create_stream_executor = [](const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status*) {
    params->stream_executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
    SetMemory(params->stream_executor);
    SetStreams(params->stream_executor);
    SetCopies(params->stream_executor);
  };
  fns->destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  fns->create_timer_fns = [](const SP_Platform*, SP_TimerFns* timers, TF_Status*) {
    timers->nanoseconds = [](SP_Timer) { return uint64_t{0}; };
  };
  fns->destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
}

}  // namespace
}  // namespace software_gpu

extern "C" __attribute__((visibility("default"))) void SE_InitPlugin(SE_PlatformRegistrationParams* params,
                                                                     TF_Status*) {
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "SOFTWARE_GPU";
  params->platform->type = "GPU";
  params->platform->use_bfc_allocator = 1;
  software_gpu::SetPlatform(params->platform_fns);
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
}
