#include "engine/staging.h"

#include <algorithm>
#include <utility>

#include "base/guard.h"
#include "base/range.h"
#include "control/coordinator.h"
#include "kernels/kernels.h"

namespace ddl {
namespace {

constexpr uint64_t kAlignment = 64;

uint64_t Aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The elements of a reduce_scatter's result that rank `rank` gets.
uint64_t OwnCount(const Announcement& a, int rank, int size) {
  return SplitEvenly(a.rows, size)[static_cast<size_t>(rank)].size() * a.row_count;
}

}  // namespace

bool IsOnDevice(const ddl_request& request) {
  if (request.kind == DDL_JOIN) return false;
  return std::any_of(request.buffers, request.buffers + request.num_buffers,
                     [](const ddl_buffer& buffer) { return buffer.location.kind != DDL_HOST; });
}

bool LibraryCanRun(const ddl_request& request, bool result_on_host, int size) {
  for (uint32_t i = 0; i < request.num_buffers; ++i) {
    if (request.buffers[i].location.kind == DDL_HOST) return false;
  }
  if (HasFreeRows(request.kind) && result_on_host) return false;
  if (request.compression != DDL_COMPRESSION_NONE) return false;
  if ((request.flags & ~(DDL_FLAG_BLOCKING | DDL_FLAG_ALL_RANKS)) != 0) return false;
  // A sum of narrow integers may not fit into their type although their mean does.
  const bool integer_mean = request.op == DDL_MEAN && !IsFloating(static_cast<ddl_dtype>(request.dtype));
  if (Reduces(request.kind) && (request.op == DDL_ADASUM || integer_mean)) return false;
  if (request.kind == DDL_REDUCE_SCATTER) return request.rows % static_cast<uint64_t>(size) == 0;
  return request.kind == DDL_ALL_REDUCE || request.kind == DDL_BROADCAST || request.kind == DDL_ALL_GATHER;
}

Staging::Staging(std::shared_ptr<Device> device, void* stream) : device_(std::move(device)), stream_(stream) {
  failure_ = Mark();
}

Staging::~Staging() {
  if (copied_.Settle()) return;
  memory_.Leak();
  gathered_.Leak();
}

void Staging::CopyIn(const Request& request, int rank) {
  if (std::exchange(begun_, true) || !failure_.ok()) return;
  failure_ = GuardedStatus([&] { return Reserve(request, rank); });
}

Status Staging::Reserve(const Request& request, int rank) {
  const Announcement& a = request.announcement;
  const size_t element = DtypeSize(static_cast<ddl_dtype>(a.dtype));
  on_host_ = request;
  on_host_.staging = nullptr;
  on_host_.ticket = nullptr;
  uint64_t total = 0;
  for (const ddl_buffer& buffer : request.buffers) total += Aligned(buffer.count * element);
  const uint64_t inputs = total;
  // The result of a reduce_scatter has its own memory.
  if (a.kind == DDL_REDUCE_SCATTER) total += inputs;
  DDL_RETURN_IF_ERROR(memory_.Reserve(*device_, total));
  std::vector<ddl_device_copy> in;
  char* at = memory_.data();
  for (ddl_buffer& buffer : on_host_.buffers) {
    const uint64_t bytes = buffer.count * element;
    if (buffer.location.kind != DDL_HOST) {
      const bool reads = a.kind != DDL_BROADCAST || a.root == rank;
      if (reads && bytes > 0) in.push_back({buffer.in, at, bytes});
      buffer = {at,
                buffer.out == nullptr          ? nullptr
                : a.kind == DDL_REDUCE_SCATTER ? at + inputs
                                               : at,
                buffer.count,
                {}};
    }
    at += Aligned(bytes);
  }
  return device_->Copy(true, ready_, in, &copied_);
}

Status Staging::Run(const Request& request, int rank, Waiter& waiter,
                    const std::function<Status(const Request& on_host)>& collective) {
  CopyIn(request, rank);
  DDL_RETURN_IF_ERROR(failure_);
  DDL_RETURN_IF_ERROR(copied_.Wait(waiter, kOwnDevice));
  const Announcement& a = request.announcement;
  const size_t element = DtypeSize(static_cast<ddl_dtype>(a.dtype));
  request_ = &request;
  if (HasFreeRows(a.kind) && !request.result_on_host) {
    on_host_.user = this;
    on_host_.allocate = [](void* self, const uint64_t* rows_by_rank, int size) {
      return static_cast<Staging*>(self)->Allocate(rows_by_rank, size);
    };
  }
  const Status status = collective(on_host_);
  if (!status.ok() && status.code() != DDL_DATA_LOSS) return status;
  for (size_t i = 0; i < request.buffers.size(); ++i) {
    const ddl_buffer& to = request.buffers[i];
    if (to.location.kind == DDL_HOST || to.out == nullptr) continue;
    const uint64_t count = a.kind == DDL_REDUCE_SCATTER ? OwnCount(a, rank, request.size) : to.count;
    if (count > 0) out_.push_back({on_host_.buffers[i].out, to.out, count * element});
  }
  const Status copied = CopyOut(out_, waiter);
  return copied.ok() ? status : copied;
}

Status Staging::CopyOut(const std::vector<ddl_device_copy>& copies, Waiter& waiter) {
  // The caller's stream may still read the memory that the copies overwrite.
  DDL_RETURN_IF_ERROR(device_->Copy(false, ready_, copies, &copied_));
  const Status status = copied_.Wait(waiter, "its own device, which copies the result");
  // The caller has its memory back when this fails.
  if (!status.ok()) (void)copied_.Settle();
  return status;
}

void* Staging::Allocate(const uint64_t* rows_by_rank, int size) {
  const Announcement& a = request_->announcement;
  uint64_t bytes = 0;
  for (int rank = 0; rank < size; ++rank) bytes += rows_by_rank[rank];
  bytes *= a.row_count * DtypeSize(static_cast<ddl_dtype>(a.dtype));
  void* const to = request_->allocate(request_->user, rows_by_rank, size);
  if (to == nullptr || !gathered_.Reserve(*device_, bytes).ok()) return nullptr;
  // Work that the stream got after the request may still use the memory.
  if (!Mark().ok()) return nullptr;
  if (bytes > 0) out_.push_back({gathered_.data(), to, bytes});
  return gathered_.data();
}

}  // namespace ddl
