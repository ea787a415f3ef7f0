// tf_handles.h: owners for the handles of TensorFlow's C API, and the one way in which the binding reports errors.
#ifndef KERAS_DDL_TF_TF_HANDLES_H_
#define KERAS_DDL_TF_TF_HANDLES_H_

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

  // Codes of ddl.h equal those of TensorFlow. Python finds its own errors, among all those of a graph, by this prefix.
  void Set(int code, const std::string& message) {
    TF_SetStatus(status_, static_cast<TF_Code>(code), ("keras_ddl: " + message).c_str());
  }

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

// The communicator published as `id`, if there is one, kept from being freed while a kernel submits to it.
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
