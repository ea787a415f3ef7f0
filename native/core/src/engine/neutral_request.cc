#include "engine/neutral_request.h"

#include <numeric>

#include "kernels/kernels.h"

namespace ddl {

Request NeutralRequest::RequestFor(const Announcement& submitted, int size) {
  Request request;
  request.announcement = submitted;
  Announcement& own = request.announcement;
  const auto dtype = static_cast<ddl_dtype>(own.dtype);
  const size_t bytes = own.kind == DDL_BARRIER ? 0 : DtypeSize(dtype);
  const auto add_neutral = [&](uint64_t more) {
    char* const data = Reserve((own.count + more) * bytes);
    FillNeutral(dtype, static_cast<ddl_op>(own.op), data, own.count);
    return data;
  };
  switch (own.kind) {
    case DDL_ALL_REDUCE: {
      char* const data = add_neutral(0);
      request.buffers.push_back({data, data, own.count, {}});
      break;
    }
    case DDL_BROADCAST: {
      char* const data = Reserve(own.count * bytes);
      request.buffers.push_back({data, data, own.count, {}});
      break;
    }
    case DDL_REDUCE_SCATTER: {
      const uint64_t most_rows = own.rows / static_cast<uint64_t>(size) + 1;
      char* const data = add_neutral(most_rows * own.row_count);
      request.buffers.push_back({data, data + own.count * bytes, own.count, {}});
      break;
    }
    case DDL_ALL_GATHER:
      own.rows = own.count = 0;
      row_bytes_ = own.row_count * bytes;
      request.buffers.push_back({Reserve(0), nullptr, 0, {}});
      request.user = this;
      request.allocate = [](void* user, const uint64_t* rows, int ranks) -> void* {
        auto& self = *static_cast<NeutralRequest*>(user);
        return self.Reserve(std::accumulate(rows, rows + ranks, uint64_t{0}) * self.row_bytes_);
      };
      break;
    default:  // a barrier has no data
      break;
  }
  return request;
}

char* NeutralRequest::Reserve(uint64_t bytes) {
  if (memory_.size() <= bytes) memory_ = std::vector<char>(bytes + 1);  // no bytes have an address, too
  return memory_.data();
}

}  // namespace ddl
