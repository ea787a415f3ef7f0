#include "kernels/kernels.h"

namespace ddl {

size_t DtypeSize(ddl_dtype dtype) {
  switch (dtype) {
    case DDL_FLOAT64:
    case DDL_INT64:
      return 8;
    case DDL_FLOAT32:
    case DDL_INT32:
      return 4;
    case DDL_FLOAT16:
    case DDL_BFLOAT16:
      return 2;
    case DDL_UINT8:
    case DDL_INT8:
      return 1;
    case DDL_NUM_DTYPES:
      break;
  }
  return 0;
}

const char* DtypeName(ddl_dtype dtype) {
  switch (dtype) {
    case DDL_FLOAT32:
      return "float32";
    case DDL_FLOAT64:
      return "float64";
    case DDL_FLOAT16:
      return "float16";
    case DDL_BFLOAT16:
      return "bfloat16";
    case DDL_INT32:
      return "int32";
    case DDL_INT64:
      return "int64";
    case DDL_UINT8:
      return "uint8";
    case DDL_INT8:
      return "int8";
    case DDL_NUM_DTYPES:
      break;
  }
  return "unknown dtype";
}

const char* OpName(ddl_op op) {
  switch (op) {
    case DDL_SUM:
      return "sum";
    case DDL_MEAN:
      return "mean";
    case DDL_MIN:
      return "min";
    case DDL_MAX:
      return "max";
    case DDL_PRODUCT:
      return "product";
    case DDL_NUM_OPS:
      break;
  }
  return "unknown op";
}

const char* KindName(ddl_kind kind) {
  switch (kind) {
    case DDL_ALL_REDUCE:
      return "all_reduce";
    case DDL_BROADCAST:
      return "broadcast";
    case DDL_REDUCE_SCATTER:
      return "reduce_scatter";
    case DDL_ALL_GATHER:
      return "all_gather";
    case DDL_BARRIER:
      return "barrier";
    case DDL_NUM_KINDS:
      break;
  }
  return "unknown kind";
}

}  // namespace ddl
