#include "engine/executor.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "base/guard.h"
#include "base/text.h"
#include "base/waiter.h"
#include "control/coordinator.h"
#include "net/transport_failure.h"
#include "net/wire.h"

namespace ddl {
namespace {

// Rows of each rank when `rows` rows are scattered: sizes differ by at most one.
std::vector<Range> RowRanges(uint64_t rows, uint64_t row_count, int size) {
  std::vector<Range> ranges = SplitEvenly(rows, size);
  for (Range& range : ranges) range = {range.begin * row_count, range.end * row_count};
  return ranges;
}

// Consecutive ranges with the given numbers of rows.
template <typename T>
std::vector<Range> RangesOf(const std::vector<T>& rows, uint64_t row_count) {
  std::vector<Range> ranges;
  uint64_t begin = 0;
  for (const T n : rows) {
    ranges.push_back({begin, begin + static_cast<uint64_t>(n) * row_count});
    begin = ranges.back().end;
  }
  return ranges;
}

// The status that `work` returns, or that memory was short for `announcement`.
template <typename Work>
Status WithinMemory(const Announcement& announcement, Work work) {
  return GuardMemory(work, [&](const std::exception&) {
    return GuardedStatus(
        [&]() -> Status { return {DDL_INTERNAL, "out of memory for the working buffers of " + Label(announcement)}; });
  });
}

}  // namespace

Status Executor::Run(const Request& request, const Decision& decision) {
  return WithinMemory(request.announcement, [&] { return RunWithMemory(request, decision); });
}

Status Executor::RunJoined(const Decision& decision) {
  return WithinMemory(*decision.submitted, [&] {
    return RunWithMemory(neutral_.RequestFor(*decision.submitted, transport_.size), decision);
  });
}

Status Executor::RunWithMemory(const Request& request, const Decision& decision) {
  const Announcement& a = request.announcement;
  // The decision itself is the barrier: it is made when every rank has arrived.
  if (a.kind == DDL_BARRIER) return {};
  if (request.staging != nullptr) return RunOnDevice(request, decision);
  const auto dtype = static_cast<ddl_dtype>(a.dtype);
  View in(DtypeSize(dtype));
  View out(DtypeSize(dtype));
  for (const ddl_buffer& buffer : request.buffers) {
    in.Add(buffer.in, buffer.count);
    out.Add(buffer.out, buffer.count);
  }
  switch (a.kind) {
    case DDL_ALL_REDUCE:
      return AllReduce(request, in, out, decision.scheme);
    case DDL_BROADCAST:
      return collectives_.Broadcast(a.root, in, out);
    case DDL_REDUCE_SCATTER:
      return ReduceScatter(request, in);
    case DDL_ALL_TO_ALL:
      return AllToAll(request, decision.rows);
    default:
      return AllGather(request, in, decision.rows);
  }
}

// Allocates the request's output. `rows`: numbers of rows by rank.
Status Executor::AllocateRows(const Request& request, const std::vector<uint64_t>& rows, char** out) {
  *out = static_cast<char*>(request.allocate(request.user, rows.data(), static_cast<int>(rows.size())));
  const uint64_t count = RangesOf(rows, request.announcement.row_count).back().end;
  if (*out != nullptr || count == 0) return {};
  return {DDL_INTERNAL, "out of memory for the " + std::to_string(count) + " elements of the result of " +
                            Label(request.announcement)};
}

Status Executor::AllReduce(const Request& request, const View& in, const View& out,
                           const std::optional<Scheme>& scheme) {
  const Announcement& a = request.announcement;
  const auto dtype = static_cast<ddl_dtype>(a.dtype);
  const auto op = static_cast<ddl_op>(a.op);
  if ((a.flags & DDL_FLAG_CHECK) != 0) return CheckedAllReduce(request, in, out);
  if ((a.flags & DDL_FLAG_PLAIN_MPI) != 0) return PlainAllReduce(in, out, dtype, op);
  if (op == DDL_MEAN && !IsFloating(dtype)) return IntegerMean(in, out, dtype);
  if (op == DDL_ADASUM) {
    std::vector<uint64_t> tensors;
    for (const ddl_buffer& buffer : request.buffers) tensors.push_back(buffer.count);
    return collectives_.AdaptiveSum(in, out, tensors, dtype);
  }
  Compressed compressed{static_cast<ddl_compression>(a.compression)};
  if (!request.feedback.empty()) compressed.errors = feedback_.Find(request.feedback, in.count());
  const Status status = collectives_.AllReduce(in, out, dtype, op, scheme, compressed);
  if (compressed.errors != nullptr) warning_ += feedback_.Trim();
  return status;
}

// The sum of narrow integers may not fit into their type although their mean does, so they are summed as int64.
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
    return TransportFailure(transport_, "MPI_Allreduce", -1, DDL_INTERNAL);
  }
  CopyView(View(in.element_bytes(), result, in.count()), out, Store::kCached);
  return {};
}

Status Executor::CheckedAllReduce(const Request& request, const View& in, const View& out) {
  const Announcement& a = request.announcement;
  const auto dtype = static_cast<ddl_dtype>(a.dtype);
  std::vector<char> expected(in.bytes());
  const View expected_view(in.element_bytes(), expected.data(), in.count());
  // The baseline runs first, because this all-reduce may overwrite its input.
  DDL_RETURN_IF_ERROR(PlainAllReduce(in, expected_view, dtype, static_cast<ddl_op>(a.op)));
  Request own = request;
  own.announcement.flags &= ~DDL_FLAG_CHECK;
  DDL_RETURN_IF_ERROR(AllReduce(own, in, out, {}));
  double difference = 0;
  View::ForEachPair(out, expected_view, 0, in.count(), [&](const char* got, const char* want, uint64_t, uint64_t n) {
    difference = std::max(difference, MaxRelativeDifference(dtype, got, want, n));
  });
  // Agreed, so that the check fails on every rank or on none.
  const View view(sizeof difference, &difference, 1);
  DDL_RETURN_IF_ERROR(collectives_.AllReduce(view, view, DDL_FLOAT64, DDL_MAX));
  if (difference <= a.tolerance) return {};
  char text[160];
  std::snprintf(text, sizeof text,
                "differs from MPI_Allreduce by %.3g (relative, largest over all ranks), more than "
                "the tolerance %.3g",
                difference, a.tolerance);
  return {DDL_DATA_LOSS, "check: all_reduce '" + a.name + "' " + text};
}

Status Executor::ReduceScatter(const Request& request, const View& in) {
  const Announcement& a = request.announcement;
  const auto dtype = static_cast<ddl_dtype>(a.dtype);
  const auto op = static_cast<ddl_op>(a.op);
  const std::vector<Range> ranges = RowRanges(a.rows, a.row_count, transport_.size);
  char* out = static_cast<char*>(request.buffers[0].out);
  if (op != DDL_MEAN || IsFloating(dtype)) return collectives_.ReduceScatter(in, out, ranges, dtype, op);
  std::vector<char> means(in.bytes());
  DDL_RETURN_IF_ERROR(IntegerMean(in, View(in.element_bytes(), means.data(), in.count()), dtype));
  const Range own = ranges[static_cast<size_t>(transport_.rank)];
  const size_t bytes = in.element_bytes();
  Copy(out, means.data() + own.begin * bytes, own.size() * bytes, Store::kCached);
  return {};
}

Status Executor::AllGather(const Request& request, const View& in, const std::vector<uint64_t>& rows) {
  char* out = nullptr;
  DDL_RETURN_IF_ERROR(AllocateRows(request, rows, &out));
  return collectives_.AllGather(in, out, RangesOf(rows, request.announcement.row_count), in.element_bytes());
}

// Tells each rank how many rows it gets from this one, and learns how many this one gets.
Status Executor::ExchangeSplits(const std::vector<int64_t>& splits, std::vector<uint64_t>* rows) {
  rows->resize(splits.size());
  const std::vector<Range> ranges = RangesOf(std::vector<uint64_t>(splits.size(), 1), sizeof splits[0]);
  return collectives_.AllToAll(reinterpret_cast<const char*>(splits.data()), ranges,
                               reinterpret_cast<char*>(rows->data()), ranges);
}

Status Executor::AllToAll(const Request& request, const std::vector<uint64_t>& decided) {
  const Announcement& a = request.announcement;
  const uint64_t row_bytes = a.row_count * DtypeSize(static_cast<ddl_dtype>(a.dtype));
  std::vector<uint64_t> rows = decided;
  if (rows.empty()) DDL_RETURN_IF_ERROR(ExchangeSplits(a.splits, &rows));  // by plan: nobody has collected them
  char* out = nullptr;
  DDL_RETURN_IF_ERROR(AllocateRows(request, rows, &out));
  return collectives_.AllToAll(static_cast<const char*>(request.buffers[0].in), RangesOf(a.splits, row_bytes), out,
                               RangesOf(rows, row_bytes));
}

}  // namespace ddl
