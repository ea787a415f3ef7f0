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
#include <vector>

#include "device/stand_in.h"
#include "kernels/kernels.h"

namespace {

constexpr int kSuccess = 0, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;

struct Arguments {
  int kind;  // ddl_kind
  const char* in;
  char* out;
  size_t count;  // a rank's share, as NCCL counts
  ddl_dtype dtype;
  ddl_op op;
  int root;
};

// A collective of all ranks, found by its number.
struct Meeting {
  std::vector<Arguments> arguments;
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
  std::atomic<bool> aborted{false};
  std::atomic<int> starting{0};  // collectives not yet on their streams
  std::vector<std::thread> starters;
};

namespace {

struct Pending {
  ncclComm* comm;
  void* stream;
  Arguments arguments;
};
thread_local std::vector<Pending> pending;
thread_local int depth = 0;

struct Task {
  ncclComm* comm;
  uint64_t number;
  Arguments arguments;
};

char* Memory(const void* device) { return static_cast<char*>(stand_in_memory(device)); }

std::vector<char> Compute(const Group& group, const std::vector<Arguments>& all, int rank) {
  const Arguments& own = all[static_cast<size_t>(rank)];
  const size_t element = ddl::DtypeSize(own.dtype);
  const size_t bytes = own.count * element;
  std::vector<char> result;
  if (own.kind == DDL_BROADCAST) {
    const char* const from = Memory(all[static_cast<size_t>(own.root)].in);
    result.assign(from, from + bytes);
  } else if (own.kind == DDL_ALL_GATHER) {
    for (const Arguments& other : all) result.insert(result.end(), Memory(other.in), Memory(other.in) + bytes);
  } else {
    const size_t skip = own.kind == DDL_REDUCE_SCATTER ? static_cast<size_t>(rank) * bytes : 0;
    std::vector<const void*> sources;
    for (const Arguments& other : all) sources.push_back(Memory(other.in) + skip);
    result.resize(bytes);
    ddl::Reduce(own.dtype, own.op, sources.data(), group.size, result.data(), own.count, group.size,
                ddl::Store::kCached);
  }
  return result;
}

void Run(void* data) {
  const std::unique_ptr<Task> task(static_cast<Task*>(data));
  ncclComm& comm = *task->comm;
  Group& group = *comm.group;
  stand_in_delay();
  std::unique_lock<std::mutex> lock(group.mutex);
  const auto wait = [&](auto ready) {
    while (!ready() && !comm.aborted) group.changed.wait_for(lock, std::chrono::milliseconds(5));
    return ready();
  };
  Meeting& meeting = group.meetings[task->number];
  meeting.arguments.resize(static_cast<size_t>(group.size));
  meeting.arguments[static_cast<size_t>(comm.rank)] = task->arguments;
  ++meeting.arrived;
  group.changed.notify_all();
  if (!wait([&] { return meeting.arrived == group.size; })) return;
  const std::vector<char> result = Compute(group, meeting.arguments, comm.rank);
  ++meeting.computed;
  group.changed.notify_all();
  if (!wait([&] { return meeting.computed == group.size; })) return;
  if (!result.empty()) std::memcpy(Memory(task->arguments.out), result.data(), result.size());
}

int Start() {
  if (pending.empty()) return kSuccess;
  ncclComm* const comm = pending.front().comm;
  std::vector<std::pair<void*, Task*>> tasks;
  for (const Pending& each : pending) tasks.emplace_back(each.stream, new Task{comm, comm->started++, each.arguments});
  pending.clear();
  comm->starting.fetch_add(1);
  if (!comm->starters.empty()) comm->starters.back().join();
  comm->starters.clear();
  comm->starters.emplace_back([comm, tasks] {
    usleep(200);
    for (const auto& [stream, task] : tasks) stand_in_enqueue(stream, Run, task);
    comm->starting.fetch_sub(1);
  });
  return kInProgress;
}

int Begin(const char* function, ncclComm* comm, void* stream, const Arguments& arguments) {
  if (stand_in_fails(function)) return kInvalidUsage;
  pending.push_back({comm, stream, arguments});
  return depth > 0 ? kSuccess : Start();
}

ddl_dtype Dtype(int type) {
  constexpr ddl_dtype kDtypes[] = {DDL_INT8,  DDL_UINT8,   DDL_INT32,   DDL_INT32,   DDL_INT64,
                                   DDL_INT64, DDL_FLOAT16, DDL_FLOAT32, DDL_FLOAT64, DDL_BFLOAT16};
  return kDtypes[type];
}
ddl_op Op(int op) {
  constexpr ddl_op kOps[] = {DDL_SUM, DDL_PRODUCT, DDL_MAX, DDL_MIN, DDL_MEAN};
  return kOps[op];
}

void Leave(ncclComm* comm) {
  for (std::thread& starter : comm->starters) starter.join();
  comm->starters.clear();
}

}  // namespace

extern "C" {

struct NcclId {
  char internal[128];
};

DDL_EXPORT int ncclGetVersion(int* version) {
  *version = 21400;
  return kSuccess;
}
DDL_EXPORT int ncclGetUniqueId(NcclId* id) {
  if (stand_in_fails("ncclGetUniqueId")) return kInvalidUsage;
  static std::atomic<int> made{0};
  std::memset(id, 0, sizeof *id);
  const std::string text = "stand-in " + std::to_string(++made);
  std::memcpy(id->internal, text.c_str(), text.size());
  return kSuccess;
}
DDL_EXPORT int ncclCommInitRankConfig(ncclComm** comm, int size, NcclId id, int rank, void*) {
  if (stand_in_fails("ncclCommInitRankConfig")) return kInvalidUsage;
  const int device = stand_in_current_device();
  if (device < 0) return kInvalidUsage;
  const std::lock_guard<std::mutex> lock(groups_mutex);
  std::weak_ptr<Group>& known = groups[id.internal];
  std::shared_ptr<Group> group = known.lock();
  if (group == nullptr) {
    group = std::make_shared<Group>();
    known = group;
  }
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
  if (stand_in_fails("ncclAsync")) *state = kRemoteError;
  return kSuccess;
}
DDL_EXPORT int ncclCommFinalize(ncclComm* comm) {
  const std::lock_guard<std::mutex> lock(comm->group->mutex);
  comm->finalizing = true;
  ++comm->group->finalized;
  return kInProgress;
}
DDL_EXPORT int ncclCommDestroy(ncclComm* comm) {
  Leave(comm);
  delete comm;
  return kSuccess;
}
DDL_EXPORT int ncclCommAbort(ncclComm* comm) {
  comm->aborted = true;
  Leave(comm);
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
  if (fails) {
    pending.clear();
    return kInvalidUsage;
  }
  return Start();
}
DDL_EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, ncclComm* comm, void* stream) {
  return Begin("ncclAllReduce", comm, stream,
               {DDL_ALL_REDUCE, static_cast<const char*>(in), static_cast<char*>(out), count, Dtype(type), Op(op), 0});
}
DDL_EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, ncclComm* comm,
                                 void* stream) {
  return Begin(
      "ncclReduceScatter", comm, stream,
      {DDL_REDUCE_SCATTER, static_cast<const char*>(in), static_cast<char*>(out), count, Dtype(type), Op(op), 0});
}
DDL_EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, ncclComm* comm,
                             void* stream) {
  return Begin(
      "ncclBroadcast", comm, stream,
      {DDL_BROADCAST, static_cast<const char*>(in), static_cast<char*>(out), count, Dtype(type), DDL_SUM, root});
}
DDL_EXPORT int ncclAllGather(const void* in, void* out, size_t count, int type, ncclComm* comm, void* stream) {
  return Begin("ncclAllGather", comm, stream,
               {DDL_ALL_GATHER, static_cast<const char*>(in), static_cast<char*>(out), count, Dtype(type), DDL_SUM, 0});
}
DDL_EXPORT const char* ncclGetErrorString(int error) {
  return error == kRemoteError ? "remote error" : error == kInvalidUsage ? "invalid usage" : "no error";
}
DDL_EXPORT const char* ncclGetLastError(ncclComm*) { return "as a test asked for"; }

}  // extern "C"
