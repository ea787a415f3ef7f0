// Compares the declarations in native/cuda/functions.h with NVIDIA's headers at compile time. Only tools/gpu_check.sh
// compiles it, where the headers are installed.
#include <cuda.h>
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "functions.h"

namespace {

// Whether two types have the same size and kind: an enum and an int, or two pointers. A CUuuid and a CUdeviceptr are
// also passed alike.
template <typename Ours, typename Theirs>
constexpr bool kAlike = sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
                        std::is_class_v<Ours> == std::is_class_v<Theirs>;

template <typename Ours, typename Theirs>
struct Compared;
template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
struct Compared<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool alike = [] {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
      return kAlike<OurResult, TheirResult> && (kAlike<Ours, Theirs> && ...);
    } else {
      return false;
    }
  }();
};

#define DDL_COMPARE(name, symbol, ...) \
  static_assert(Compared<decltype(ddl_cuda::CudaFunctions::name), decltype(&symbol)>::alike, #symbol);
DDL_CUDA_FUNCTIONS(DDL_COMPARE)
#undef DDL_COMPARE
#define DDL_COMPARE(result, name, symbol, ...) \
  static_assert(Compared<decltype(ddl_cuda::NcclFunctions::name), decltype(&symbol)>::alike, #symbol);
DDL_NCCL_FUNCTIONS(DDL_COMPARE)
#undef DDL_COMPARE

static_assert(ddl_cuda::kCudaNotReady == CUDA_ERROR_NOT_READY);
static_assert(ddl_cuda::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ddl_cuda::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ddl_cuda::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(ddl_cuda::kNcclInProgress == ncclInProgress);
static_assert(sizeof(ddl_cuda::NcclId) == sizeof(ncclUniqueId));
static_assert(offsetof(ncclConfig_t, magic) == offsetof(ddl_cuda::NcclConfig, magic));
static_assert(offsetof(ncclConfig_t, version) == offsetof(ddl_cuda::NcclConfig, version));
static_assert(offsetof(ncclConfig_t, blocking) == offsetof(ddl_cuda::NcclConfig, blocking));
// The numbers in nccl_group.cc, in terms of ddl.h's.
static_assert(ncclFloat32 == 7 && ncclFloat64 == 8 && ncclFloat16 == 6 && ncclBfloat16 == 9 && ncclInt32 == 2 &&
              ncclInt64 == 4 && ncclUint8 == 1 && ncclInt8 == 0);
static_assert(ncclSum == 0 && ncclProd == 1 && ncclMax == 2 && ncclMin == 3 && ncclAvg == 4);

}  // namespace
