#include "nccl_group.h"

#include <unistd.h>

#include <cstring>
#include <utility>

namespace ddl_cuda {
namespace {

// The time limit of an orderly end, which waits for ranks that leave later.
constexpr int kFinalizePolls = 1000;
constexpr unsigned kFinalizePollUs = 1000;

// Numbers of ncclDataType_t and ncclRedOp_t, by those of ddl.h.
constexpr int kTypes[DDL_NUM_DTYPES] = {7, 8, 6, 9, 2, 4, 1, 0};
constexpr int kOps[DDL_ADASUM] = {0, 4, 3, 2, 1};

}  // namespace

bool NcclGroup::Check(int result, const char* what, std::string* error) const {
  if (result == kNcclSuccess || result == kNcclInProgress) return true;
  const char* const last = nccl_->GetLastError(comm_);
  *error = std::string(what) + ": " + nccl_->GetErrorString(result) +
           (last != nullptr && *last != '\0' ? std::string(" (") + last + ")" : "");
  return false;
}

bool NcclGroup::MakeId(const NcclFunctions& nccl, void* id, std::string* error) {
  NcclId made;
  const int result = nccl.GetUniqueId(&made);
  if (result != kNcclSuccess) *error = std::string("ncclGetUniqueId: ") + nccl.GetErrorString(result);
  std::memcpy(id, &made, sizeof made);
  return result == kNcclSuccess;
}

bool NcclGroup::Connect(const void* id, int rank, int size, std::string* error) {
  NcclId copy;
  std::memcpy(&copy, id, sizeof copy);
  NcclConfig config;
  return Check(nccl_->CommInitRankConfig(&comm_, size, copy, rank, &config), "ncclCommInitRankConfig", error);
}

int NcclGroup::Begin(const ddl_device_collective& collective, const ddl_buffer& buffer, CudaStream stream) const {
  const int type = kTypes[collective.dtype];
  switch (collective.kind) {
    case DDL_ALL_REDUCE:
      return nccl_->AllReduce(buffer.in, buffer.out, buffer.count, type, kOps[collective.op], comm_, stream);
    case DDL_REDUCE_SCATTER:
      return nccl_->ReduceScatter(buffer.in, buffer.out, buffer.count, type, kOps[collective.op], comm_, stream);
    case DDL_BROADCAST:
      return nccl_->Broadcast(buffer.in, buffer.out, buffer.count, type, collective.root, comm_, stream);
    default:
      return nccl_->AllGather(buffer.in, buffer.out, buffer.count, type, comm_, stream);
  }
}

bool NcclGroup::Run(const ddl_device_collective& collective, CudaStream stream, std::string* error) {
  if (!Check(nccl_->GroupStart(), "ncclGroupStart", error)) return false;
  bool begun = true;
  for (uint32_t i = 0; i < collective.num_buffers && begun; ++i) {
    if (collective.buffers[i].count == 0) continue;
    begun = Check(Begin(collective, collective.buffers[i], stream), "starting a collective of NCCL", error);
  }
  const int ended = nccl_->GroupEnd();
  return begun && Check(ended, "ncclGroupEnd", error);
}

bool NcclGroup::Poll(int* ready, std::string* error) {
  int state = kNcclSuccess;
  const int result = nccl_->CommGetAsyncError(comm_, &state);
  if (!Check(result, "ncclCommGetAsyncError", error) || !Check(state, "NCCL", error)) return false;
  *ready = state == kNcclSuccess ? 1 : 0;
  return true;
}

void NcclGroup::Disconnect(bool abort) {
  const NcclComm comm = std::exchange(comm_, nullptr);
  if (comm == nullptr) return;
  int state = abort ? kNcclInProgress : nccl_->CommFinalize(comm);
  if (!abort && (state == kNcclSuccess || state == kNcclInProgress)) {
    state = kNcclInProgress;
    for (int i = 0; i < kFinalizePolls && state == kNcclInProgress; ++i) {
      if (i > 0) usleep(kFinalizePollUs);
      if (nccl_->CommGetAsyncError(comm, &state) != kNcclSuccess) break;
    }
  }
  if (state == kNcclSuccess) {
    nccl_->CommDestroy(comm);
  } else {
    nccl_->CommAbort(comm);
  }
}

}  // namespace ddl_cuda
