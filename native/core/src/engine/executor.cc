#include "engine/executor.h"

#include <cstdio>
#include <exception>
#include <limits>

#include "base/text.h"
#include "base/trace.h"
#include "base/waiter.h"
#include "control/coordinator.h"
#include "net/wire.h"

namespace ddl {
namespace {

// Rows of each rank when `rows` rows are scattered: sizes differ by at most one.
std::vector<Range> RowRanges(uint64_t rows, uint64_t row_count, int size) {
  std::vector<Range> ranges = SplitEvenly(rows, size);
  for (Range& range : ranges) range = {range.begin * row_count, range.end * row_count};
  return ranges;
}

}  // namespace

void Request::TraceRun(double agreed, double started, int code) const {
  const Announcement& a = announcement;
  const uint64_t bytes = a.kind == DDL_BARRIER ? 0 : a.count * DtypeSize(static_cast<ddl_dtype>(a.dtype));
  Trace::Add({KindName(static_cast<ddl_kind>(a.kind)), a.name, bytes, code, submitted, agreed, started, Now()});
}

Status Executor::Run(const Request& request, const Decision& decision, bool* broken) {
  try {
    return RunWithMemory(request, decision, broken);
  } catch (const std::exception&) {  // std::bad_alloc, or std::length_error for what no machine has
    // The others are in the middle of it, and hear why.
    *broken = true;
    return {DDL_INTERNAL, "no memory for what " + Label(request.announcement) + " keeps on its way"};
  }
}

Status Executor::RunWithMemory(const Request& request, const Decision& decision, bool* broken) {
  const Announcement& a = request.announcement;
  // The decision itself is the barrier: it is taken when every rank has come.
  if (a.kind == DDL_BARRIER) return {};
  const auto dtype = static_cast<ddl_dtype>(a.dtype);
  View in(DtypeSize(dtype));
  View out(DtypeSize(dtype));
  for (const ddl_buffer& buffer : request.buffers) {
    in.Add(buffer.in, buffer.count);
    out.Add(buffer.out, buffer.count);
  }
  Status status;
  switch (a.kind) {
    case DDL_ALL_REDUCE:
      return AllReduce(request, in, out, decision.scheme, broken);
    case DDL_BROADCAST:
      status = collectives_.Broadcast(a.root, in, out);
      break;
    case DDL_REDUCE_SCATTER:
      return ReduceScatter(request, in, broken);
    default:
      return AllGather(request, in, decision.rows, broken);
  }
  *broken = !status.ok();
  return status;
}

Status Executor::AllReduce(const Request& request, const View& in, const View& out, const std::optional<Scheme>& scheme,
                           bool* broken) {
  const Announcement& a = request.announcement;
  const auto dtype = static_cast<ddl_dtype>(a.dtype);
  const auto op = static_cast<ddl_op>(a.op);
  if ((a.flags & DDL_FLAG_CHECK) != 0) return CheckedAllReduce(request, in, out, broken);
  Status status;
  if ((a.flags & DDL_FLAG_PLAIN_MPI) != 0) {
    status = PlainAllReduce(in, out, dtype, op);
  } else if (op == DDL_MEAN && !IsFloating(dtype)) {
    status = IntegerMean(in, out, dtype);
  } else {
    status = collectives_.AllReduce(in, out, dtype, op, scheme);
  }
  *broken = !status.ok();
  return status;
}

// The sum of narrow integers need not fit where their mean does: summed as int64.
Status Executor::IntegerMean(const View& in, const View& out, ddl_dtype dtype) {
  const size_t bytes = DtypeSize(dtype);
  std::vector<int64_t> wide(in.count());
  in.ForEach(0, in.count(), [&](const char* data, uint64_t offset, uint64_t n) {
    if (dtype == DDL_INT64) {
      Copy(wide.data() + offset, data, n * bytes, Store::kCached);
    } else {
      WidenToInt64(dtype, data, wide.data() + offset, n);
    }
  });
  const View view(sizeof(int64_t), wide.data(), wide.size());
  DDL_RETURN_IF_ERROR(collectives_.AllReduce(view, view, DDL_INT64, DDL_SUM));
  out.ForEach(0, out.count(), [&](char* data, uint64_t offset, uint64_t n) {
    DivideFromInt64(dtype, wide.data() + offset, data, n, transport_.size);
  });
  return {};
}

Status Executor::PlainAllReduce(const View& in, const View& out, ddl_dtype dtype, ddl_op op) {
  WireMemory memory;
  char* const packed = memory.Reserve(2 * in.bytes());
  char* const result = packed + in.bytes();
  CopyView(in, View(in.element_bytes(), packed, in.count()), Store::kCached);
  const int code = transport_.plain_all_reduce(transport_.self, packed, result, in.count(), dtype, op);
  if (code != DDL_OK) {
    memory.Leak();  // parts of it may still be under way
    return {DDL_INTERNAL, std::string("MPI_Allreduce: ") + transport_.last_error(transport_.self)};
  }
  CopyView(View(in.element_bytes(), result, in.count()), out, Store::kCached);
  return {};
}

Status Executor::CheckedAllReduce(const Request& request, const View& in, const View& out, bool* broken) {
  const Announcement& a = request.announcement;
  const auto dtype = static_cast<ddl_dtype>(a.dtype);
  std::vector<char> expected(in.bytes());
  const View expected_view(in.element_bytes(), expected.data(), in.count());
  // First, because the own all-reduce may overwrite its input.
  Status status = PlainAllReduce(in, expected_view, dtype, static_cast<ddl_op>(a.op));
  *broken = !status.ok();
  if (!status.ok()) return status;
  Request own = request;
  own.announcement.flags &= ~DDL_FLAG_CHECK;
  DDL_RETURN_IF_ERROR(AllReduce(own, in, out, {}, broken));
  double difference = 0;
  View::ForEachPair(out, expected_view, 0, in.count(), [&](const char* got, const char* want, uint64_t, uint64_t n) {
    difference = std::max(difference, MaxRelativeDifference(dtype, got, want, n));
  });
  // Agreed, so that the check fails on every rank or on none.
  const View view(sizeof difference, &difference, 1);
  status = collectives_.AllReduce(view, view, DDL_FLOAT64, DDL_MAX);
  *broken = !status.ok();
  if (!status.ok() || difference <= a.tolerance) return status;
  char text[160];
  std::snprintf(text, sizeof text,
                "differs from MPI_Allreduce by %.3g (relative, largest over all ranks), more than "
                "the tolerance %.3g",
                difference, a.tolerance);
  return {DDL_DATA_LOSS, "check: all_reduce '" + a.name + "' " + text};
}

Status Executor::ReduceScatter(const Request& request, const View& in, bool* broken) {
  const Announcement& a = request.announcement;
  const auto dtype = static_cast<ddl_dtype>(a.dtype);
  const auto op = static_cast<ddl_op>(a.op);
  const std::vector<Range> ranges = RowRanges(a.rows, a.row_count, transport_.size);
  char* out = static_cast<char*>(request.buffers[0].out);
  Status status;
  if (op == DDL_MEAN && !IsFloating(dtype)) {
    std::vector<char> whole(in.bytes());
    status = IntegerMean(in, View(in.element_bytes(), whole.data(), in.count()), dtype);
    const Range own = ranges[static_cast<size_t>(transport_.rank)];
    const size_t bytes = in.element_bytes();
    if (status.ok()) Copy(out, whole.data() + own.begin * bytes, own.size() * bytes, Store::kCached);
  } else {
    status = collectives_.ReduceScatter(in, out, ranges, dtype, op);
  }
  *broken = !status.ok();
  return status;
}

Status Executor::AllGather(const Request& request, const View& in, const std::vector<uint64_t>& rows, bool* broken) {
  std::vector<Range> ranges;
  uint64_t total = 0;
  for (uint64_t n : rows) {
    ranges.push_back({total, total + n * request.announcement.row_count});
    total = ranges.back().end;
  }
  void* out = request.allocate(request.user, rows.data(), static_cast<int>(rows.size()));
  // A rank without memory still has to take its part, or the others would hang: the communicator is given up.
  *broken = out == nullptr && total > 0;
  if (*broken) return {DDL_INTERNAL, "no memory for the " + std::to_string(total) + " elements of an all_gather"};
  const Status status = collectives_.AllGather(in, static_cast<char*>(out), ranges, in.element_bytes());
  *broken = !status.ok();
  return status;
}

void Request::Describe(const ddl_request& from) {
  announcement.kind = from.kind;
  announcement.dtype = from.dtype;
  announcement.op = from.op;
  announcement.root = from.root;
  announcement.flags = from.flags;
  announcement.row_count = from.row_count;
  announcement.rows = from.rows;
  announcement.fingerprint = from.fingerprint;
  announcement.step = from.step;
  announcement.tolerance = from.tolerance;
  announcement.name = from.name;
  if (from.detail != nullptr) announcement.detail = Cut(from.detail, kMaxDetail);
  if (from.num_buffers > 0) buffers.assign(from.buffers, from.buffers + from.num_buffers);
  for (const ddl_buffer& buffer : buffers) announcement.count += buffer.count;
  allocate = from.allocate;
  done = from.done;
  user = from.user;
}

Status Validate(const ddl_request& request, int size) {
  const auto refuse = [&](const std::string& rule, const std::string& received) {
    return Status(DDL_INVALID_ARGUMENT, rule + " Received: " + received + ".");
  };
  if (request.name == nullptr || request.name[0] == '\0') return refuse("name: must not be empty.", "an empty name");
  if (std::char_traits<char>::length(request.name) > kMaxName) {
    return refuse("name: at most " + std::to_string(kMaxName) + " bytes.", Cut(request.name, 80));
  }
  if (request.kind >= DDL_NUM_KINDS) return refuse("kind: unknown.", std::to_string(request.kind));
  if (request.kind == DDL_BARRIER) return {};
  if (request.dtype >= DDL_NUM_DTYPES) return refuse("dtype: unknown.", std::to_string(request.dtype));
  if (request.op >= DDL_NUM_OPS) return refuse("op: unknown.", std::to_string(request.op));
  if (request.kind == DDL_BROADCAST && (request.root < 0 || request.root >= size)) {
    return refuse("root: must be a rank, 0 to " + std::to_string(size - 1) + ".", std::to_string(request.root));
  }
  const bool rows = request.kind == DDL_REDUCE_SCATTER || request.kind == DDL_ALL_GATHER;
  if (rows && (request.num_buffers != 1 || request.buffers[0].count != request.rows * request.row_count)) {
    return refuse("rows: one buffer of rows * row_count elements.",
                  std::to_string(request.num_buffers) + " buffer(s), " + std::to_string(request.rows) + " rows of " +
                      std::to_string(request.row_count));
  }
  const bool baseline = (request.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK)) != 0;
  if (baseline && request.kind != DDL_ALL_REDUCE) {
    return refuse("mpi, check: for all_reduce only.", KindName(static_cast<ddl_kind>(request.kind)));
  }
  if ((request.flags & DDL_FLAG_CHECK) != 0 && !(request.tolerance >= 0)) {
    return refuse("check: the tolerance must be a number >= 0.", std::to_string(request.tolerance));
  }
  return {};
}

}  // namespace ddl
