// The functions of libcuda and libnccl that this library calls, looked up when the first device is opened. They are
// declared here because a machine that builds the package has no NVIDIA headers, and both libraries keep these
// functions stable for years. headers_test.cc compares the declarations with the headers if they are installed.
#ifndef KERAS_DDL_CUDA_FUNCTIONS_H_
#define KERAS_DDL_CUDA_FUNCTIONS_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace ddl_cuda {

// ---- libcuda
using CudaDevice = int;
using CudaContext = struct CUctx_st*;
using CudaStream = struct CUstream_st*;
using CudaEvent = struct CUevent_st*;
using CudaPointer = unsigned long long;  // NOLINT: as cuda.h says
struct CudaUuid {
  char bytes[16];
};

constexpr int kCudaSuccess = 0;
constexpr int kCudaNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;

#define DDL_CUDA_FUNCTIONS(F)                                                            \
  F(Init, cuInit, unsigned)                                                              \
  F(DriverGetVersion, cuDriverGetVersion, int*)                                          \
  F(DeviceGet, cuDeviceGet, CudaDevice*, int)                                            \
  F(DeviceGetName, cuDeviceGetName, char*, int, CudaDevice)                              \
  F(DeviceGetUuid, cuDeviceGetUuid_v2, CudaUuid*, CudaDevice)                            \
  F(PrimaryCtxRetain, cuDevicePrimaryCtxRetain, CudaContext*, CudaDevice)                \
  F(PrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, CudaDevice)                         \
  F(CtxPushCurrent, cuCtxPushCurrent_v2, CudaContext)                                    \
  F(CtxPopCurrent, cuCtxPopCurrent_v2, CudaContext*)                                     \
  F(StreamCreate, cuStreamCreate, CudaStream*, unsigned)                                 \
  F(StreamDestroy, cuStreamDestroy_v2, CudaStream)                                       \
  F(StreamWaitEvent, cuStreamWaitEvent, CudaStream, CudaEvent, unsigned)                 \
  F(EventCreate, cuEventCreate, CudaEvent*, unsigned)                                    \
  F(EventDestroy, cuEventDestroy_v2, CudaEvent)                                          \
  F(EventRecord, cuEventRecord, CudaEvent, CudaStream)                                   \
  F(EventQuery, cuEventQuery, CudaEvent)                                                 \
  F(MemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, void*, CudaPointer, size_t, CudaStream)       \
  F(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, CudaPointer, const void*, size_t, CudaStream) \
  F(MemHostRegister, cuMemHostRegister_v2, void*, size_t, unsigned)                      \
  F(MemHostUnregister, cuMemHostUnregister, void*)                                       \
  F(GetErrorString, cuGetErrorString, int, const char**)

struct CudaFunctions {
#define DDL_DECLARE(name, symbol, ...) int (*name)(__VA_ARGS__) = nullptr;
  DDL_CUDA_FUNCTIONS(DDL_DECLARE)
#undef DDL_DECLARE
};

// ---- libnccl
using NcclComm = struct ncclComm*;
struct NcclId {
  char internal[128];
};
// The first fields of ncclConfig_t, all that NCCL 2.14 had. Later versions fill in the others.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

constexpr int kNcclSuccess = 0;
constexpr int kNcclInProgress = 7;

#define DDL_NCCL_FUNCTIONS(F)                                                                          \
  F(int, GetVersion, ncclGetVersion, int*)                                                             \
  F(int, GetUniqueId, ncclGetUniqueId, NcclId*)                                                        \
  F(int, CommInitRankConfig, ncclCommInitRankConfig, NcclComm*, int, NcclId, int, NcclConfig*)         \
  F(int, CommGetAsyncError, ncclCommGetAsyncError, NcclComm, int*)                                     \
  F(int, CommFinalize, ncclCommFinalize, NcclComm)                                                     \
  F(int, CommDestroy, ncclCommDestroy, NcclComm)                                                       \
  F(int, CommAbort, ncclCommAbort, NcclComm)                                                           \
  F(int, GroupStart, ncclGroupStart, void)                                                             \
  F(int, GroupEnd, ncclGroupEnd, void)                                                                 \
  F(int, AllReduce, ncclAllReduce, const void*, void*, size_t, int, int, NcclComm, CudaStream)         \
  F(int, Broadcast, ncclBroadcast, const void*, void*, size_t, int, int, NcclComm, CudaStream)         \
  F(int, ReduceScatter, ncclReduceScatter, const void*, void*, size_t, int, int, NcclComm, CudaStream) \
  F(int, AllGather, ncclAllGather, const void*, void*, size_t, int, NcclComm, CudaStream)              \
  F(const char*, GetErrorString, ncclGetErrorString, int)                                              \
  F(const char*, GetLastError, ncclGetLastError, NcclComm)

struct NcclFunctions {
#define DDL_DECLARE(result, name, symbol, ...) result (*name)(__VA_ARGS__) = nullptr;
  DDL_NCCL_FUNCTIONS(DDL_DECLARE)
#undef DDL_DECLARE
};

// Returns the functions, or nullptr with the reason in *error. The library stays loaded. Any thread.
const CudaFunctions* Cuda(std::string* error);
const NcclFunctions* Nccl(std::string* error);

}  // namespace ddl_cuda
#endif  // KERAS_DDL_CUDA_FUNCTIONS_H_
