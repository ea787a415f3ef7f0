// NcclGroup: this rank's end of an NCCL communicator. It never blocks: NCCL works in the background, and `Poll` returns
// its progress. One thread at a time, with the device's context current.
#ifndef KERAS_DDL_CUDA_NCCL_GROUP_H_
#define KERAS_DDL_CUDA_NCCL_GROUP_H_

#include <string>

#include "ddl_device.h"
#include "functions.h"

namespace ddl_cuda {

class NcclGroup {
 public:
  // `nccl` is NULL where the library is missing. Then only Disconnect may be called.
  explicit NcclGroup(const NcclFunctions* nccl) : nccl_(nccl) {}

  // See ddl_device. Functions that return bool return false with the reason in *error.
  static bool MakeId(const NcclFunctions& nccl, void* id, std::string* error);
  bool Connect(const void* id, int rank, int size, std::string* error);
  bool Run(const ddl_device_collective& collective, CudaStream stream, std::string* error);
  bool Poll(int* ready, std::string* error);
  void Disconnect(bool abort);

 private:
  bool Check(int result, const char* what, std::string* error) const;
  int Begin(const ddl_device_collective& collective, const ddl_buffer& buffer, CudaStream stream) const;

  const NcclFunctions* nccl_;
  NcclComm comm_ = nullptr;
};

}  // namespace ddl_cuda
#endif  // KERAS_DDL_CUDA_NCCL_GROUP_H_
