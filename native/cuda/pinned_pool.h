// PinnedPool: host memory that the device copies from and to at full speed, kept for the next request.
//
// It is ordinary memory that the driver has locked. Other processes may not be able to read memory that the driver
// itself makes (cuMemHostAlloc), but the engine's collectives inside a host do so (process_vm_readv).
#ifndef KERAS_DDL_CUDA_PINNED_POOL_H_
#define KERAS_DDL_CUDA_PINNED_POOL_H_

#include <cstddef>
#include <map>
#include <mutex>

#include "functions.h"

namespace ddl_cuda {

class PinnedPool {
 public:
  // The context must be current in each call.
  explicit PinnedPool(const CudaFunctions& cuda) : cuda_(cuda) {}
  ~PinnedPool() { Clear(); }
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // NULL: there is no memory.
  void* Take(size_t bytes);
  void GiveBack(void* memory);
  // Gives unused memory back to the system.
  void Clear();

 private:
  struct Block {
    size_t bytes;
    bool locked;
  };
  const CudaFunctions& cuda_;
  std::mutex mutex_;
  std::map<void*, Block> blocks_;           // all
  std::multimap<size_t, void*> available_;  // by size
};

}  // namespace ddl_cuda
#endif  // KERAS_DDL_CUDA_PINNED_POOL_H_
