// device.cc: the software GPU, a TensorFlow device made of threads, for tests on machines without a GPU.
//
// TensorFlow sees a device of type "GPU" through the C interface of stream executors. Behind it is the stand-in for
// libcuda, which keras_ddl's device layer finds under libcuda's name: device pointers point to memory without access
// rights, so host code that uses one dies of SIGSEGV; a stream is a thread with a queue; copies and kernels run with a
// random delay after the call that enqueues them has returned, so code that does not wait for them reads wrong values.
//
// SOFTWARE_GPU_DEVICES: the number of devices, 2 unless set.
#include "device/stand_in_cuda.cc"  // libcuda's functions have no header here
#include "software_gpu.h"

namespace software_gpu {

char* MemoryOf(const void* pointer) { return stand_in_memory(pointer); }

void Launch(SP_Stream stream, std::function<void()> kernel) {
  stand_in_enqueue(stream, [kernel = std::move(kernel)] {
    stand_in_delay();
    kernel();
  });
}

namespace {

constexpr int64_t kDeviceBytes = 320 << 20;  // of which TensorFlow leaves 225 MiB to others
constexpr size_t kHostAlignment = 256;

int NumDevices() {
  const char* text = std::getenv("SOFTWARE_GPU_DEVICES");
  return text == nullptr ? 2 : std::stoi(text);
}

void Must(int result) {
  if (result != kSuccess) std::abort();
}

// Makes a device current on this thread from now on, as CUDA's runtime does.
void Use(const SP_Device* device) {
  if (stand_in_current_device() == device->ordinal) return;
  void* context = nullptr;
  Must(cuDevicePrimaryCtxRetain(&context, device->ordinal));
  Must(cuCtxPushCurrent_v2(context));
}

CUstream_st* InCuda(SP_Stream stream) { return reinterpret_cast<CUstream_st*>(stream); }
CUevent_st* InCuda(SP_Event event) { return reinterpret_cast<CUevent_st*>(event); }

std::mutex streams_mutex;
std::map<SP_Stream, int> streams;  // with the numbers of their devices

// Waits for all work enqueued on any stream.
void Synchronize() {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  for (auto [stream, ordinal] : streams) Must(cuStreamSynchronize(InCuda(stream)));
}

void SetMemory(SP_StreamExecutor* se) {
  se->allocate = [](const SP_Device* device, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
    Use(device);
    char* allocated = nullptr;
    if (cuMemAlloc_v2(&allocated, size) != kSuccess) allocated = nullptr;
    memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
    memory->opaque = allocated;
    memory->size = allocated == nullptr ? 0 : size;
  };
  se->deallocate = [](const SP_Device*, SP_DeviceMemoryBase* memory) {
    Synchronize();  // like cudaFree
    if (memory->opaque != nullptr) Must(cuMemFree_v2(static_cast<char*>(memory->opaque)));
  };
  se->host_memory_allocate = [](const SP_Device*, uint64_t size) {
    return std::aligned_alloc(kHostAlignment, (size / kHostAlignment + 1) * kHostAlignment);
  };
  se->host_memory_deallocate = [](const SP_Device*, void* memory) { std::free(memory); };
  se->get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return 0; };
  se->device_memory_usage = [](const SP_Device*, int64_t* free, int64_t* total) -> TF_Bool {
    *free = *total = kDeviceBytes;
    return 1;
  };
}

void SetStreams(SP_StreamExecutor* se) {
  se->create_stream = [](const SP_Device* device, SP_Stream* stream, TF_Status*) {
    Use(device);
    Must(cuStreamCreate(reinterpret_cast<CUstream_st**>(stream), 0));
    const std::lock_guard<std::mutex> lock(streams_mutex);
    streams[*stream] = device->ordinal;
  };
  se->destroy_stream = [](const SP_Device*, SP_Stream stream) {
    {
      const std::lock_guard<std::mutex> lock(streams_mutex);
      streams.erase(stream);
    }
    Must(cuStreamDestroy_v2(InCuda(stream)));
  };
  se->create_stream_dependency = [](const SP_Device* device, SP_Stream dependent, SP_Stream other, TF_Status*) {
    Use(device);
    CUevent_st* event = nullptr;
    Must(cuEventCreate(&event, 0));
    Must(cuEventRecord(event, InCuda(other)));
    Must(cuStreamWaitEvent(InCuda(dependent), event, 0));
    Must(cuEventDestroy_v2(event));
  };
  se->get_stream_status = [](const SP_Device*, SP_Stream, TF_Status*) {};
  se->create_event = [](const SP_Device* device, SP_Event* event, TF_Status*) {
    Use(device);
    Must(cuEventCreate(reinterpret_cast<CUevent_st**>(event), 0));
  };
  se->destroy_event = [](const SP_Device*, SP_Event event) { Must(cuEventDestroy_v2(InCuda(event))); };
  se->get_event_status = [](const SP_Device* device, SP_Event event) {
    Use(device);
    return cuEventQuery(InCuda(event)) == kSuccess ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
  };
  se->record_event = [](const SP_Device* device, SP_Stream stream, SP_Event event, TF_Status*) {
    Use(device);
    Must(cuEventRecord(InCuda(event), InCuda(stream)));
  };
  se->wait_for_event = [](const SP_Device* const device, SP_Stream stream, SP_Event event, TF_Status* const) {
    Use(device);
    Must(cuStreamWaitEvent(InCuda(stream), InCuda(event), 0));
  };
  se->block_host_for_event = [](const SP_Device* device, SP_Event event, TF_Status*) {
    Use(device);
    while (cuEventQuery(InCuda(event)) == kNotReady) usleep(50);
  };
  se->block_host_until_done = [](const SP_Device*, SP_Stream stream, TF_Status*) {
    Must(cuStreamSynchronize(InCuda(stream)));
  };
  se->synchronize_all_activity = [](const SP_Device*, TF_Status*) { Synchronize(); };
  se->host_callback = [](const SP_Device*, SP_Stream stream, SE_StatusCallbackFn function, void* argument) -> TF_Bool {
    Launch(stream, [function, argument] {
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

void SetCopies(SP_StreamExecutor* se) {
  se->memcpy_dtoh = [](const SP_Device* device, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from,
                       uint64_t size, TF_Status*) {
    Use(device);
    Must(cuMemcpyDtoHAsync_v2(to, static_cast<char*>(from->opaque), size, InCuda(stream)));
  };
  se->memcpy_htod = [](const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from,
                       uint64_t size, TF_Status*) {
    Use(device);
    Must(cuMemcpyHtoDAsync_v2(static_cast<char*>(to->opaque), const_cast<void*>(from), size, InCuda(stream)));
  };
  se->memcpy_dtod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                       uint64_t size, TF_Status*) {
    Launch(stream, [=, to = MemoryOf(to->opaque), from = MemoryOf(from->opaque)] { std::memcpy(to, from, size); });
  };
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
  fns->get_device_count = [](const SP_Platform*, int* count, TF_Status*) { *count = NumDevices(); };
  fns->create_device = [](const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
    params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    params->device->ordinal = params->ordinal;
    params->device->hardware_name = "software GPU";
    params->device->device_vendor = "keras_ddl's tests";
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

int OrdinalOf(SP_Stream stream) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  return streams.at(stream);
}

}  // namespace software_gpu

extern "C" {

DDL_EXPORT int cuDeviceGetCount(int* count) {
  *count = software_gpu::NumDevices();
  return kSuccess;
}

DDL_EXPORT void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "SOFTWARE_GPU";
  params->platform->type = "GPU";
  params->platform->use_bfc_allocator = 1;
  software_gpu::SetPlatform(params->platform_fns);
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
}

}  // extern "C"
