#include "attributes.h"

#include "tf_handles.h"

namespace keras_ddl::tf {
namespace {

struct DTypeRow {
  TF_DataType tf;
  ddl_dtype ddl;
};
constexpr DTypeRow kDTypes[] = {{TF_FLOAT, DDL_FLOAT32},     {TF_DOUBLE, DDL_FLOAT64}, {TF_HALF, DDL_FLOAT16},
                                {TF_BFLOAT16, DDL_BFLOAT16}, {TF_INT32, DDL_INT32},    {TF_INT64, DDL_INT64},
                                {TF_UINT8, DDL_UINT8},       {TF_INT8, DDL_INT8}};

struct OpRow {
  const char* name;
  ddl_op op;
};
constexpr OpRow kOps[] = {{"sum", DDL_SUM}, {"mean", DDL_MEAN},       {"avg", DDL_MEAN},     {"min", DDL_MIN},
                          {"max", DDL_MAX}, {"product", DDL_PRODUCT}, {"adasum", DDL_ADASUM}};

struct CompressionRow {
  const char* name;
  ddl_compression compression;
};
constexpr CompressionRow kCompressions[] = {{"bfloat16", DDL_COMPRESSION_BFLOAT16},
                                            {"float16", DDL_COMPRESSION_FLOAT16}};

void ReadDType(TF_OpKernelConstruction* construction, Attributes* attributes, Status* status) {
  TF_OpKernelConstruction_GetAttrType(construction, "T", &attributes->tf_dtype, status->get());
  if (!status->ok()) return;
  for (const DTypeRow& row : kDTypes) {
    if (row.tf == attributes->tf_dtype) {
      attributes->dtype = row.ddl;
      return;
    }
  }
  status->Set(DDL_INTERNAL, "T: TensorFlow admitted dtype " + std::to_string(attributes->tf_dtype) +
                                ", which the op's definition does not list.");
}

// The string attribute `name`, or "" after an error in `status`.
std::string ReadString(TF_OpKernelConstruction* construction, const char* name, TF_Status* status) {
  int32_t list_size = 0;
  int32_t total_size = 0;
  TF_OpKernelConstruction_GetAttrSize(construction, name, &list_size, &total_size, status);
  if (TF_GetCode(status) != TF_OK || total_size <= 0) return "";
  std::string value(static_cast<size_t>(total_size), '\0');
  TF_OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(), status);
  return value;
}

void ReadReduction(TF_OpKernelConstruction* construction, Attributes* attributes, Status* status) {
  const std::string reduction = ReadString(construction, "reduction", status->get());
  if (!status->ok()) return;
  for (const OpRow& row : kOps) {
    if (reduction == row.name) {
      attributes->op = row.op;
      return;
    }
  }
  status->Set(DDL_INVALID_ARGUMENT,
              "reduction: must be one of sum, mean, avg, min, max, product, adasum. Received: '" + reduction + "'.");
}

void ReadBaseline(TF_OpKernelConstruction* construction, Attributes* attributes, Status* status) {
  TF_Bool mpi = 0;
  TF_OpKernelConstruction_GetAttrBool(construction, "mpi", &mpi, status->get());
  if (!status->ok()) return;
  float check = -1;
  TF_OpKernelConstruction_GetAttrFloat(construction, "check", &check, status->get());
  if (!status->ok()) return;
  if (mpi) attributes->flags |= DDL_FLAG_PLAIN_MPI;
  if (check >= 0) {
    attributes->flags |= DDL_FLAG_CHECK;
    attributes->tolerance = check;
  }
}

void ReadCompression(TF_OpKernelConstruction* construction, Attributes* attributes, Status* status) {
  const std::string compression = ReadString(construction, "compression", status->get());
  if (!status->ok()) return;
  attributes->feedback = ReadString(construction, "feedback", status->get());
  if (!status->ok() || compression.empty()) return;
  for (const CompressionRow& row : kCompressions) {
    if (compression == row.name) {
      attributes->compression = row.compression;
      return;
    }
  }
  status->Set(DDL_INVALID_ARGUMENT,
              "compression: must be bfloat16, float16 or empty. Received: '" + compression + "'.");
}

void ReadPlan(TF_OpKernelConstruction* construction, Attributes* attributes, Status* status) {
  int64_t numbers[3] = {0, 0, 0};
  const char* const names[3] = {"plan", "plan_index", "plan_size"};
  for (int i = 0; i < 3 && status->ok(); ++i) {
    TF_OpKernelConstruction_GetAttrInt64(construction, names[i], &numbers[i], status->get());
  }
  attributes->plan = static_cast<uint64_t>(numbers[0]);
  attributes->plan_index = static_cast<uint32_t>(numbers[1]);
  attributes->plan_size = static_cast<uint32_t>(numbers[2]);
}

void ReadAllRanks(TF_OpKernelConstruction* construction, Attributes* attributes, Status* status) {
  TF_Bool all_ranks = 0;
  TF_OpKernelConstruction_GetAttrBool(construction, "all_ranks", &all_ranks, status->get());
  if (all_ranks) attributes->flags |= DDL_FLAG_ALL_RANKS;
}

void ReadCommon(TF_OpKernelConstruction* construction, Attributes* attributes, Status* status) {
  attributes->name = ReadString(construction, "tensor_name", status->get());
  if (!status->ok()) return;
  if (attributes->name.empty()) {
    const TF_StringView node = TF_OpKernelConstruction_GetName(construction);
    attributes->name.assign(node.data, node.len);
  }
  attributes->detail = ReadString(construction, "detail", status->get());
  if (!status->ok()) return;
  int64_t fingerprint = 0;
  TF_OpKernelConstruction_GetAttrInt64(construction, "fingerprint", &fingerprint, status->get());
  if (!status->ok()) return;
  attributes->fingerprint = static_cast<uint64_t>(fingerprint);
  TF_OpKernelConstruction_GetAttrInt64(construction, "communicator", &attributes->communicator, status->get());
  if (!status->ok()) return;
  TF_Bool blocking = 0;
  TF_OpKernelConstruction_GetAttrBool(construction, "blocking", &blocking, status->get());
  if (blocking) attributes->flags |= DDL_FLAG_BLOCKING;
}

}  // namespace

bool ReadAttributes(TF_OpKernelConstruction* construction, ddl_kind kind, Attributes* attributes) {
  Status status;
  attributes->kind = kind;
  ReadDType(construction, attributes, &status);
  if (status.ok()) ReadCommon(construction, attributes, &status);
  if (status.ok() && (kind == DDL_ALL_REDUCE || kind == DDL_REDUCE_SCATTER)) {
    ReadReduction(construction, attributes, &status);
  }
  if (status.ok() && kind == DDL_ALL_REDUCE) ReadBaseline(construction, attributes, &status);
  if (status.ok() && kind == DDL_ALL_REDUCE) ReadCompression(construction, attributes, &status);
  const bool can_be_planned = kind == DDL_ALL_REDUCE || kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL;
  if (status.ok() && can_be_planned) ReadPlan(construction, attributes, &status);
  if (status.ok() && kind == DDL_ALL_GATHER) ReadAllRanks(construction, attributes, &status);
  if (status.ok() && kind == DDL_BROADCAST) {
    int64_t root = 0;
    TF_OpKernelConstruction_GetAttrInt64(construction, "root", &root, status.get());
    attributes->root = static_cast<int32_t>(root);
  }
  if (status.ok()) return true;
  TF_OpKernelConstruction_Failure(construction, status.get());
  return false;
}

}  // namespace keras_ddl::tf
