// Device memory and streams for tests, from libcuda or its stand-in, whichever is loaded.
#ifndef KERAS_DDL_TESTS_DEVICE_GPU_H_
#define KERAS_DDL_TESTS_DEVICE_GPU_H_

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddl.h"
#include "ddl_cuda.h"
#include "device/stand_in.h"
#include "functions.h"
#include "thread_group.h"

namespace ddl_test {

// Returns a function of the loaded libcuda, or nullptr.
template <typename Function>
Function InCuda(const char* symbol) {
  static void* const handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return handle == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(handle, symbol));
}

// The stand-in's own functions, which do nothing with the real library.
inline bool HasStandIn() { return InCuda<void*>("stand_in_fail") != nullptr; }
inline void FailNext(const char* function, bool always = false) {
  InCuda<decltype(&stand_in_fail)>("stand_in_fail")(function, always);
}
inline void Heal() { InCuda<decltype(&stand_in_heal)>("stand_in_heal")(); }
inline int64_t Alive(const char* what) { return InCuda<decltype(&stand_in_count)>("stand_in_count")(what); }
inline void Stall(bool stalled) { InCuda<decltype(&stand_in_stall)>("stand_in_stall")(stalled); }

// This thread's context on a device, and its allocations there.
class Gpu {
 public:
  explicit Gpu(int ordinal) : location_{DDL_CUDA, ordinal} {
    std::string error;
    cuda_ = ddl_cuda::Cuda(&error);
    EXPECT_NE(cuda_, nullptr) << error;
    Must(cuda_->Init(0));
    Must(cuda_->DeviceGet(&device_, ordinal));
    Must(cuda_->PrimaryCtxRetain(&context_, device_));
    Must(cuda_->CtxPushCurrent(context_));
    Must(cuda_->StreamCreate(&stream_, ddl_cuda::kStreamNonBlocking));
  }
  ~Gpu() {
    for (const ddl_cuda::CudaPointer memory : memory_) free_(memory);
    Must(cuda_->StreamDestroy(stream_));
    ddl_cuda::CudaContext ignored = nullptr;
    Must(cuda_->CtxPopCurrent(&ignored));
    Must(cuda_->PrimaryCtxRelease(device_));
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const ddl_location& location() const { return location_; }
  void* stream() const { return stream_; }

  // Returns new device memory.
  void* Allocate(size_t bytes) {
    ddl_cuda::CudaPointer memory = 0;
    Must(allocate_(&memory, bytes + 1));
    memory_.push_back(memory);
    return reinterpret_cast<void*>(memory);
  }
  // Writes `bytes` on the stream, with a delay, so readers must wait for the stream. `bytes` must live until then.
  void Write(void* to, const std::vector<uint8_t>& bytes) {
    if (!bytes.empty()) {
      Must(cuda_->MemcpyHtoDAsync(reinterpret_cast<ddl_cuda::CudaPointer>(to), bytes.data(), bytes.size(), stream_));
    }
  }
  // Reads on a separate stream that waits for nothing, so it misses results that are not complete.
  std::vector<uint8_t> Read(const void* from, size_t bytes) {
    std::vector<uint8_t> result(bytes);
    if (bytes == 0) return result;
    ddl_cuda::CudaStream other = nullptr;
    Must(cuda_->StreamCreate(&other, ddl_cuda::kStreamNonBlocking));
    Must(cuda_->MemcpyDtoHAsync(result.data(), reinterpret_cast<ddl_cuda::CudaPointer>(from), bytes, other));
    Must(synchronize_(other));
    Must(cuda_->StreamDestroy(other));
    return result;
  }
  void Synchronize() { Must(synchronize_(stream_)); }

 private:
  void Must(int result) { EXPECT_EQ(result, 0); }

  const ddl_location location_;
  const ddl_cuda::CudaFunctions* cuda_ = nullptr;
  int (*const allocate_)(ddl_cuda::CudaPointer*, size_t) = InCuda<decltype(allocate_)>("cuMemAlloc_v2");
  int (*const free_)(ddl_cuda::CudaPointer) = InCuda<decltype(free_)>("cuMemFree_v2");
  int (*const synchronize_)(ddl_cuda::CudaStream) = InCuda<decltype(synchronize_)>("cuStreamSynchronize");
  ddl_cuda::CudaDevice device_ = 0;
  ddl_cuda::CudaContext context_ = nullptr;
  ddl_cuda::CudaStream stream_ = nullptr;
  std::vector<ddl_cuda::CudaPointer> memory_;
};

// Adds device `ordinal` to the communicator; `tweak` may change its function table.
inline Outcome AddDevice(ddl_comm* comm, int ordinal, uint32_t mode,
                         const std::function<void(ddl_device&)>& tweak = nullptr) {
  char error[1024] = "";
  ddl_device device;
  int code = ddl_cuda_open(ordinal, mode != DDL_DEVICE_STAGED, &device, error, sizeof error);
  if (code == DDL_OK && tweak) tweak(device);
  if (code != DDL_OK) return {code, error, "", {}};
  uint64_t number = 0;
  if (ddl_add_device(comm, &device, mode, "devices", &number) == DDL_OK) return {};
  const ddl_failure* const failure = ddl_find_failure(number);
  const Outcome outcome = OutcomeOf(failure);
  ddl_release_failure(failure);
  return outcome;
}

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_DEVICE_GPU_H_
