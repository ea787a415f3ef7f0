// PinnedPool: memory of the host that the device copies from and to at full speed, kept for the next request.
//
// It is ordinary memory that the driver has locked. Memory that the driver itself makes (cuMemHostAlloc) may not be
// readable for other processes (process_vm_readv), and the engine's collectives inside a host read it that way.
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
  // Gives the system back what is not taken.
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
