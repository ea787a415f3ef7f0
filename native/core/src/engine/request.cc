#include "engine/request.h"

#include <string>

#include "base/text.h"
#include "base/trace.h"
#include "base/waiter.h"
#include "common/hash.h"
#include "kernels/kernels.h"

namespace ddl {

void Request::TraceRun(double agreed, double started, int code) const {
  const Announcement& a = announcement;
  const uint64_t bytes =
      a.kind == DDL_BARRIER || a.kind == DDL_JOIN ? 0 : a.count * DtypeSize(static_cast<ddl_dtype>(a.dtype));
  const char* const kind = KindName(static_cast<ddl_kind>(a.kind));
  Trace::Add({kind, a.name.empty() ? std::string_view(kind) : a.name, bytes, code, submitted, agreed, started, Now()});
}

Terms TermsOf(const ddl_request& request) {
  Terms terms{
      request.kind,      request.dtype, request.op,          request.root,     request.flags, request.compression, 0,
      request.row_count, request.rows,  request.fingerprint, request.tolerance};
  for (uint32_t i = 0; i < request.num_buffers; ++i) {
    terms.count += request.buffers[i].count;
    // The boundaries between tensors are part of the plan.
    if (Reduces(request.kind) && request.op == DDL_ADASUM) {
      terms.fingerprint = HashNumber(request.buffers[i].count, terms.fingerprint);
    }
  }
  return terms;
}

uint64_t BytesOf(const ddl_request& request) {
  uint64_t count = 0;
  for (uint32_t i = 0; i < request.num_buffers; ++i) count += request.buffers[i].count;
  return count * DtypeSize(static_cast<ddl_dtype>(request.dtype));
}

void Request::Describe(const ddl_request& from, int size) {
  static_cast<Terms&>(announcement) = TermsOf(from);
  announcement.step = from.step;
  if (from.kind == DDL_ALL_TO_ALL) announcement.splits.assign(from.splits, from.splits + size);
  if (from.kind != DDL_JOIN) announcement.name = from.name;
  if (from.detail != nullptr) announcement.detail = Truncate(from.detail, kMaxDetail);
  if (from.compression != DDL_COMPRESSION_NONE && from.feedback != nullptr) {
    feedback = Truncate(from.feedback, kMaxName);
  }
  if (from.num_buffers > 0) buffers.assign(from.buffers, from.buffers + from.num_buffers);
  allocate = from.allocate;
  done = from.done;
  user = from.user;
  place = {from.plan, from.plan_run, from.plan_index, from.plan_size};
  this->size = size;
}

Status Validate(const ddl_request& request, int size) {
  const auto refuse = [&](const std::string& rule, const std::string& received) {
    return Status(DDL_INVALID_ARGUMENT, rule + " Received: " + received + ".");
  };
  if (request.kind == DDL_JOIN) {
    if (request.num_buffers == 1 && request.buffers[0].count == 1 && request.buffers[0].out != nullptr) return {};
    return refuse("join: one buffer, for the rank that joined last.", std::to_string(request.num_buffers));
  }
  if (request.name == nullptr || request.name[0] == '\0') return refuse("name: must not be empty.", "an empty name");
  if (std::char_traits<char>::length(request.name) > kMaxName) {
    return refuse("name: at most " + std::to_string(kMaxName) + " bytes.", Truncate(request.name, 80));
  }
  if (request.kind >= DDL_NUM_KINDS) return refuse("kind: unknown.", std::to_string(request.kind));
  if (request.kind == DDL_BARRIER) return {};
  if (request.dtype >= DDL_NUM_DTYPES) return refuse("dtype: unknown.", std::to_string(request.dtype));
  if (request.op >= DDL_NUM_OPS) return refuse("op: unknown.", std::to_string(request.op));
  if (request.op == DDL_ADASUM && Reduces(request.kind)) {
    if (request.kind != DDL_ALL_REDUCE || (request.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK)) != 0) {
      return refuse(
          "adasum: for all_reduce only, without mpi and check.",
          std::string(KindName(static_cast<ddl_kind>(request.kind))) + ", flags " + std::to_string(request.flags));
    }
    if (!IsFloating(static_cast<ddl_dtype>(request.dtype))) {
      return refuse("adasum: floating dtypes only.", DtypeName(static_cast<ddl_dtype>(request.dtype)));
    }
  }
  if (request.kind == DDL_BROADCAST && (request.root < 0 || request.root >= size)) {
    return refuse("root: must be a rank, 0 to " + std::to_string(size - 1) + ".", std::to_string(request.root));
  }
  const bool can_be_planned = request.kind == DDL_ALL_REDUCE || HasFreeRows(request.kind);
  if (request.plan_size > 0 && (!can_be_planned || request.plan_index >= request.plan_size ||
                                (request.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK)) != 0)) {
    return refuse("plan: all_reduce without mpi or check, all_gather or all_to_all, its index below the plan's size.",
                  std::string(KindName(static_cast<ddl_kind>(request.kind))) + ", index " +
                      std::to_string(request.plan_index) + " of " + std::to_string(request.plan_size));
  }
  const bool rows = request.kind == DDL_REDUCE_SCATTER || HasFreeRows(request.kind);
  if (rows && (request.num_buffers != 1 || request.buffers[0].count != request.rows * request.row_count)) {
    return refuse("rows: one buffer of rows * row_count elements.",
                  std::to_string(request.num_buffers) + " buffer(s), " + std::to_string(request.rows) + " rows of " +
                      std::to_string(request.row_count));
  }
  // The coordinator checks whether the splits add up, and fails the request on all ranks if they do not.
  if (request.kind == DDL_ALL_TO_ALL && request.splits == nullptr) {
    return refuse("splits: a number of rows for each rank.", "none");
  }
  const bool baseline = (request.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK)) != 0;
  if (baseline && request.kind != DDL_ALL_REDUCE) {
    return refuse("mpi, check: for all_reduce only.", KindName(static_cast<ddl_kind>(request.kind)));
  }
  if (request.compression != DDL_COMPRESSION_NONE) {
    if (request.compression >= DDL_NUM_COMPRESSIONS) {
      return refuse("compression: unknown.", std::to_string(request.compression));
    }
    const bool sums = request.kind == DDL_ALL_REDUCE && (request.op == DDL_SUM || request.op == DDL_MEAN);
    if (!sums || request.dtype != DDL_FLOAT32) {
      return refuse("compression: for sums and means of float32 by all_reduce only.",
                    std::string(KindName(static_cast<ddl_kind>(request.kind))) + " of " +
                        DtypeName(static_cast<ddl_dtype>(request.dtype)) + " by " +
                        OpName(static_cast<ddl_op>(request.op)));
    }
    if ((request.flags & DDL_FLAG_PLAIN_MPI) != 0) {
      return refuse("compression: not with mpi, which sends the data as it is.", "both");
    }
  }
  if ((request.flags & DDL_FLAG_CHECK) != 0 && !(request.tolerance >= 0)) {
    return refuse("check: the tolerance must be a number >= 0.", std::to_string(request.tolerance));
  }
  return {};
}

}  // namespace ddl
