#include "init_call.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attributes.h"
#include "collective_call.h"
#include "ddl.h"
#include "fingerprint.h"
#include "tf_handles.h"

namespace keras_ddl::tf {
namespace {

// Equal for ranks of one machine, also when they run in different containers, whose host names differ.
std::string HostIdentity() {
  std::string identity;
  std::ifstream boot_id("/proc/sys/kernel/random/boot_id");
  if (std::getline(boot_id, identity) && !identity.empty()) return identity;
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

class InitCall {
 public:
  InitCall(ddl_comm* comm, TF_OpKernelContext* context, int32_t device_id, const std::string& pci,
           std::function<void()> finish)
      : comm_(comm),
        context_(context),
        device_id_(device_id),
        record_(HostIdentity() + "\n" + pci),
        finish_(std::move(finish)) {}

  const std::string& record() const { return record_; }

  void* Allocate(const uint64_t* rows_by_rank, int size) {
    rows_.assign(rows_by_rank, rows_by_rank + size);
    uint64_t bytes = 0;
    for (uint64_t rows : rows_) bytes += rows;
    records_.resize(bytes + 1);  // never nullptr, which would mean failure
    return records_.data();
  }

  void Finish(int code, const char* message) {
    Status status;
    if (code != DDL_OK) {
      status.Set(code, message == nullptr ? "the core gave no message" : message);
    } else {
      SetOutputs(&status);
    }
    if (!status.ok()) TF_OpKernelContext_Failure(context_, status.get());
    finish_();
  }

 private:
  // Places this rank among those of its host, which may be more than share memory with it (mode x:1x4).
  void SetOutputs(Status* status) {
    const std::string host = record_.substr(0, record_.find('\n') + 1);
    const int32_t rank = ddl_rank(comm_);
    int32_t local_rank = 0;
    int32_t local_size = 0;
    std::map<std::string, size_t> owners;
    size_t offset = 0;
    for (size_t r = 0; r < rows_.size(); ++r) {
      const std::string record(records_.data() + offset, rows_[r]);
      offset += rows_[r];
      if (record.compare(0, host.size(), host) == 0) {
        ++local_size;
        if (r < static_cast<size_t>(rank)) ++local_rank;
      }
      if (record.empty() || record.back() == '\n') continue;  // a rank that names no device
      const auto [owner, added] = owners.emplace(record, r);
      if (added) continue;
      status->Set(DDL_INVALID_ARGUMENT, "init_op: ranks of one host must use different devices. Received: pci='" +
                                            record.substr(record.find('\n') + 1) + "' on ranks " +
                                            std::to_string(owner->second) + " and " + std::to_string(r) +
                                            ". Give each rank the device of its local_rank.");
      return;
    }
    const int32_t values[] = {rank, ddl_size(comm_), local_rank, local_size, device_id_ < 0 ? local_rank : device_id_};
    for (int i = 0; i < 5; ++i) {
      TensorPtr output(TF_AllocateOutput(context_, i, TF_INT32, nullptr, 0, sizeof(int32_t), status->get()));
      if (!status->ok()) return;
      std::memcpy(TF_TensorData(output.get()), &values[i], sizeof(int32_t));
    }
  }

  ddl_comm* comm_;
  TF_OpKernelContext* context_;
  int32_t device_id_;
  std::string record_;
  std::function<void()> finish_;
  std::vector<uint64_t> rows_;
  std::vector<char> records_;
};

}  // namespace

bool ReadInitAttributes(TF_OpKernelConstruction* construction, InitAttributes* attributes) {
  Status status;
  attributes->mode = ReadString(construction, "mode", status.get());
  if (status.ok()) attributes->pci = ReadString(construction, "pci", status.get());
  if (!status.ok()) TF_OpKernelConstruction_Failure(construction, status.get());
  return status.ok();
}

void StartInit(const InitAttributes& attributes, TF_OpKernelContext* context, std::function<void()> finish) {
  const HeldComm world(DDL_WORLD);
  ddl_comm* comm = world.get();
  if (comm == nullptr) {
    FailNotFound(context, DDL_WORLD, "init_op");
    finish();
    return;
  }
  Status status;
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context, 0, &tensor, status.get());
  TensorPtr device(tensor);
  if (status.ok() && TF_NumDims(tensor) != 0) {
    status.Set(DDL_INVALID_ARGUMENT, "init_op: device_id must be a scalar. Received: a tensor with " +
                                         std::to_string(TF_NumDims(tensor)) + " dimensions.");
  }
  if (!status.ok()) {
    TF_OpKernelContext_Failure(context, status.get());
    finish();
    return;
  }
  int32_t device_id = 0;
  std::memcpy(&device_id, TF_TensorData(tensor), sizeof(device_id));
  device.reset();

  auto call = std::make_unique<InitCall>(comm, context, device_id, attributes.pci, std::move(finish));
  const std::string detail = "init_op, mode='" + attributes.mode + "'";
  Fingerprint fingerprint;
  fingerprint.Add(attributes.mode);
  const ddl_buffer buffer = {call->record().data(), nullptr, call->record().size()};
  ddl_request request = {};
  request.kind = DDL_ALL_GATHER;
  request.dtype = DDL_UINT8;
  request.num_buffers = 1;
  request.buffers = &buffer;
  request.rows = buffer.count;
  request.row_count = 1;
  request.fingerprint = fingerprint.value();
  request.name = "keras_ddl/init_op";
  request.detail = detail.c_str();
  request.allocate = [](void* user, const uint64_t* rows_by_rank, int size) {
    return static_cast<InitCall*>(user)->Allocate(rows_by_rank, size);
  };
  request.done = [](void* user, int code, const char* message) {
    std::unique_ptr<InitCall> owned(static_cast<InitCall*>(user));
    owned->Finish(code, message);
  };
  request.user = call.release();
  ddl_submit(comm, &request);
}

}  // namespace keras_ddl::tf
