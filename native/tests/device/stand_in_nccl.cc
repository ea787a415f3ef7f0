// A stand-in for libnccl.so.2 between threads of one process. Collectives run on the streams of the stand-in for CUDA,
// where ranks wait for one another, and start late, as in a communicator that does not block.
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/stand_in.h"
#include "functions.h"
#include "kernels/kernels.h"

using ddl_cuda::NcclId;

namespace {

constexpr int kSuccess = 0, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;

// One rank's call of a collective.
struct Call {
  std::string function;
  const void* in;
  void* out;
  size_t count;  // a rank's share, as NCCL counts
  int type, op, root;
  void* stream;
};

// A collective of all ranks, found by its number.
struct Meeting {
  std::vector<Call> calls;
  int arrived = 0, computed = 0;
};

struct Group {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0, joined = 0, finalized = 0;
  std::set<int> devices;
  std::map<uint64_t, Meeting> meetings;
};

std::mutex groups_mutex;
std::map<std::string, std::weak_ptr<Group>> groups;

}  // namespace

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank = 0;
  uint64_t started = 0;
  bool finalizing = false;
  std::string last;  // the function of the last collective
  std::atomic<bool> aborted{false};
  std::atomic<int> starting{0};  // collectives not yet on their streams
  std::thread starter;
};

namespace {

thread_local std::vector<Call> pending;
thread_local ncclComm* pending_comm = nullptr;
thread_local int depth = 0;

ddl_dtype DtypeOf(int type) {
  constexpr ddl_dtype kDtypes[] = {DDL_INT8,  DDL_UINT8,   DDL_INT32,   DDL_INT32,   DDL_INT64,
                                   DDL_INT64, DDL_FLOAT16, DDL_FLOAT32, DDL_FLOAT64, DDL_BFLOAT16};
  return kDtypes[type];
}

std::vector<char> Compute(const std::vector<Call>& calls, int rank) {
  constexpr ddl_op kOps[] = {DDL_SUM, DDL_PRODUCT, DDL_MAX, DDL_MIN, DDL_MEAN};
  const Call& own = calls[static_cast<size_t>(rank)];
  const ddl_dtype dtype = DtypeOf(own.type);
  const size_t bytes = own.count * ddl::DtypeSize(dtype);
  std::vector<char> result(bytes);
  if (own.function == "ncclBroadcast") {
    std::memcpy(result.data(), stand_in_memory(calls[static_cast<size_t>(own.root)].in), bytes);
  } else if (own.function == "ncclAllGather") {
    result.clear();
    for (const Call& other : calls) {
      result.insert(result.end(), stand_in_memory(other.in), stand_in_memory(other.in) + bytes);
    }
  } else {
    const size_t skip = own.function == "ncclReduceScatter" ? static_cast<size_t>(rank) * bytes : 0;
    std::vector<const void*> sources;
    for (const Call& other : calls) sources.push_back(stand_in_memory(other.in) + skip);
    const int size = static_cast<int>(calls.size());
    ddl::Reduce(dtype, kOps[own.op], sources.data(), size, result.data(), own.count, size, ddl::Store::kCached);
  }
  return result;
}

// On the stream.
void Run(ncclComm& comm, uint64_t number, const Call& call) {
  Group& group = *comm.group;
  stand_in_delay();
  std::unique_lock<std::mutex> lock(group.mutex);
  const auto wait_for_all = [&](int& count) {
    ++count;
    group.changed.notify_all();
    while (count < group.size && !comm.aborted) group.changed.wait_for(lock, std::chrono::milliseconds(5));
    return count == group.size;
  };
  Meeting& meeting = group.meetings[number];
  meeting.calls.resize(static_cast<size_t>(group.size));
  meeting.calls[static_cast<size_t>(comm.rank)] = call;
  if (!wait_for_all(meeting.arrived)) return;
  const std::vector<char> result = Compute(meeting.calls, comm.rank);
  if (!wait_for_all(meeting.computed)) return;
  if (!result.empty()) std::memcpy(stand_in_memory(call.out), result.data(), result.size());
}

int Start() {
  if (pending.empty()) return kSuccess;
  ncclComm* const comm = pending_comm;
  if (comm->starter.joinable()) comm->starter.join();
  comm->starting = 1;
  comm->starter = std::thread([comm, calls = std::exchange(pending, {})] {
    usleep(200);
    for (const Call& call : calls) {
      stand_in_enqueue(call.stream, [comm, number = comm->started++, call] { Run(*comm, number, call); });
    }
    comm->starting = 0;
  });
  return kInProgress;
}

int Begin(ncclComm* comm, Call call) {
  if (stand_in_fails(call.function.c_str())) return kInvalidUsage;
  {
    const std::lock_guard<std::mutex> lock(comm->group->mutex);
    comm->last = call.function;
  }
  pending_comm = comm;
  pending.push_back(std::move(call));
  return depth > 0 ? kSuccess : Start();
}

}  // namespace

extern "C" {

DDL_EXPORT int ncclGetVersion(int* version) {
  *version = 21400;
  return kSuccess;
}
DDL_EXPORT int ncclGetUniqueId(NcclId* id) {
  if (stand_in_fails("ncclGetUniqueId")) return kInvalidUsage;
  static std::atomic<int> made{0};
  *id = {};
  const std::string text = "stand-in " + std::to_string(++made);
  std::memcpy(id->internal, text.c_str(), text.size());
  return kSuccess;
}
DDL_EXPORT int ncclCommInitRankConfig(ncclComm** comm, int size, NcclId id, int rank, void*) {
  const int device = stand_in_current_device();
  if (stand_in_fails("ncclCommInitRankConfig") || device < 0) return kInvalidUsage;
  const std::lock_guard<std::mutex> lock(groups_mutex);
  std::weak_ptr<Group>& known = groups[id.internal];
  std::shared_ptr<Group> group = known.lock();
  if (group == nullptr) known = group = std::make_shared<Group>();
  const std::lock_guard<std::mutex> group_lock(group->mutex);
  group->size = size;
  ++group->joined;
  group->devices.insert(device);
  *comm = new ncclComm;
  (*comm)->group = group;
  (*comm)->rank = rank;
  return kInProgress;
}
DDL_EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* state) {
  const std::lock_guard<std::mutex> lock(comm->group->mutex);
  const Group& group = *comm->group;
  *state = group.joined < group.size || comm->starting > 0 || (comm->finalizing && group.finalized < group.size)
               ? kInProgress
               : kSuccess;
  // NCCL refuses two ranks on one device.
  if (group.joined == group.size && static_cast<int>(group.devices.size()) < group.size) *state = kInvalidUsage;
  if (stand_in_fails("ncclAsync") || stand_in_fails(("ncclAsync in " + comm->last).c_str())) *state = kRemoteError;
  return kSuccess;
}
DDL_EXPORT int ncclCommFinalize(ncclComm* comm) {
  const std::lock_guard<std::mutex> lock(comm->group->mutex);
  comm->finalizing = true;
  ++comm->group->finalized;
  return kInProgress;
}
DDL_EXPORT int ncclCommDestroy(ncclComm* comm) {
  if (comm->starter.joinable()) comm->starter.join();
  delete comm;
  return kSuccess;
}
DDL_EXPORT int ncclCommAbort(ncclComm* comm) {
  comm->aborted = true;
  if (comm->starter.joinable()) comm->starter.join();
  // A task on a stream may still read it, until it sees the abort.
  static std::mutex kept_mutex;
  static auto* const kept = new std::vector<ncclComm*>;
  const std::lock_guard<std::mutex> lock(kept_mutex);
  kept->push_back(comm);
  return kSuccess;
}
DDL_EXPORT int ncclGroupStart() {
  ++depth;
  return kSuccess;
}
DDL_EXPORT int ncclGroupEnd() {
  const bool fails = stand_in_fails("ncclGroupEnd");
  if (--depth > 0) return kSuccess;
  if (!fails) return Start();
  pending.clear();
  return kInvalidUsage;
}
DDL_EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, ncclComm* comm, void* stream) {
  return Begin(comm, {"ncclAllReduce", in, out, count, type, op, 0, stream});
}
DDL_EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, ncclComm* comm,
                                 void* stream) {
  return Begin(comm, {"ncclReduceScatter", in, out, count, type, op, 0, stream});
}
DDL_EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, ncclComm* comm,
                             void* stream) {
  return Begin(comm, {"ncclBroadcast", in, out, count, type, 0, root, stream});
}
DDL_EXPORT int ncclAllGather(const void* in, void* out, size_t count, int type, ncclComm* comm, void* stream) {
  return Begin(comm, {"ncclAllGather", in, out, count, type, 0, 0, stream});
}
DDL_EXPORT const char* ncclGetErrorString(int error) {
  return error == kRemoteError ? "remote error" : error == kInvalidUsage ? "invalid usage" : "no error";
}
DDL_EXPORT const char* ncclGetLastError(ncclComm*) { return "as a test asked for"; }

}  // extern "C"
