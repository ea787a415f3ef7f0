#include "kernels/kernels.h"

namespace ddl {

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
    case DDL_ADASUM:
      return "adasum";
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
    case DDL_JOIN:
      return "join";
    case DDL_ALL_TO_ALL:
      return "all_to_all";
    case DDL_NUM_KINDS:
      break;
  }
  return "unknown kind";
}

const char* CompressionName(ddl_compression compression) {
  switch (compression) {
    case DDL_COMPRESSION_NONE:
      return "none";
    case DDL_COMPRESSION_BFLOAT16:
      return "bfloat16";
    case DDL_COMPRESSION_FLOAT16:
      return "float16";
    case DDL_NUM_COMPRESSIONS:
      break;
  }
  return "unknown compression";
}

}  // namespace ddl
