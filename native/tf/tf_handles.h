// tf_handles.h: owners for the handles of TensorFlow's C API, and the one way in which the binding reports errors.
#ifndef KERAS_DDL_TF_TF_HANDLES_H_
#define KERAS_DDL_TF_TF_HANDLES_H_

#include <cinttypes>
#include <cstdio>
#include <memory>
#include <string>

#include "ddl.h"
#include "tf_c_api.h"

namespace keras_ddl::tf {

class Status {
 public:
  Status() : status_(TF_NewStatus()) {}
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;
  ~Status() { TF_DeleteStatus(status_); }

  TF_Status* get() const { return status_; }
  bool ok() const { return TF_GetCode(status_) == TF_OK; }

  // Codes of ddl.h equal TensorFlow's. TensorFlow only keeps the text, and adds to it. It may replace the code
  // (UNAVAILABLE), and then does not pass on payloads. So the text begins with the number of the failure, by which
  // Python finds its fields (keras_ddl/ops/errors.py).
  void Set(const ddl_failure& failure, int64_t communicator) {
    ddl_failure numbered = failure;
    numbered.communicator = communicator;
    char number[24];
    std::snprintf(number, sizeof number, "%012" PRIx64, ddl_keep_failure(&numbered));
    const std::string text = std::string("keras_ddl[") + number + "]: " + failure.message;
    TF_SetStatus(status_, static_cast<TF_Code>(failure.code), text.c_str());
  }
  void Set(int code, const std::string& message) { Set(ddl_failure{code, 0, nullptr, message.c_str(), "", -1}, -1); }

 private:
  TF_Status* status_;
};

struct TensorDeleter {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using TensorPtr = std::unique_ptr<TF_Tensor, TensorDeleter>;

struct ShapeDeleter {
  void operator()(TF_ShapeHandle* shape) const { TF_DeleteShapeHandle(shape); }
};
using ShapePtr = std::unique_ptr<TF_ShapeHandle, ShapeDeleter>;

// Holds the communicator published as `id`, if there is one, so that it is not freed while a kernel submits to it.
class HeldComm {
 public:
  explicit HeldComm(int64_t id) : comm_(ddl_find(id)) {}
  HeldComm(const HeldComm&) = delete;
  HeldComm& operator=(const HeldComm&) = delete;
  ~HeldComm() {
    if (comm_ != nullptr) ddl_release(comm_);
  }
  ddl_comm* get() const { return comm_; }

 private:
  ddl_comm* comm_;
};

}  // namespace keras_ddl::tf

#endif  // KERAS_DDL_TF_TF_HANDLES_H_
