// attributes.h: the attributes of one op, read once when TensorFlow makes its kernel.
#ifndef KERAS_DDL_TF_ATTRIBUTES_H_
#define KERAS_DDL_TF_ATTRIBUTES_H_

#include <string>

#include "ddl.h"
#include "tf_c_api.h"

namespace keras_ddl::tf {

struct Attributes {
  ddl_kind kind = DDL_ALL_REDUCE;
  bool on_gpu = false;  // the tensors of dtype `T` are in a GPU's memory; set by the kernel
  TF_DataType tf_dtype = TF_FLOAT;
  ddl_dtype dtype = DDL_FLOAT32;
  ddl_op op = DDL_SUM;
  int32_t root = 0;
  uint32_t flags = 0;
  double tolerance = 0;
  uint32_t compression = DDL_COMPRESSION_NONE;
  std::string feedback;
  uint64_t fingerprint = 0;
  uint64_t plan = 0;
  uint32_t plan_index = 0;
  uint32_t plan_size = 0;
  int64_t communicator = DDL_WORLD;
  std::string name;
  std::string detail;
};

// Reads the attributes that ops of `kind` have (registration.cc lists them). False: construction has failed with a
// status, and `attributes` must not be used.
bool ReadAttributes(TF_OpKernelConstruction* construction, ddl_kind kind, Attributes* attributes);

}  // namespace keras_ddl::tf

#endif  // KERAS_DDL_TF_ATTRIBUTES_H_
