// How the executor runs a request on device memory: by the device's library among all ranks, by the library inside
// hosts and rings between them, or through the host's memory. Ranks take the same way, because they know the same: what
// they agreed on when they added their devices, which groups could connect, and which way was the fastest.
#include <unistd.h>

#include <algorithm>

#include "engine/executor.h"
#include "engine/staging.h"
#include "kernels/kernels.h"

namespace ddl {
namespace {

// The library's time limits for connecting, where there is no other way and where there is, and the interval at which
// ranks exchange whether it has connected.
constexpr double kRequiredConnectSeconds = 120.0;
constexpr double kConnectSeconds = 30.0;
constexpr double kConnectSliceSeconds = 0.1;
constexpr double kLostRankSeconds = 2.0;
constexpr unsigned kLostRankPollUs = 1000;

char* At(const void* memory, uint64_t bytes) { return static_cast<char*>(const_cast<void*>(memory)) + bytes; }

}  // namespace

Status Executor::RunOnDevice(const Request& request, const Decision& decision) {
  Device& device = *request.staging->device();
  const Announcement& a = request.announcement;
  // A rank that has joined has no device memory, so all ranks send their data through the host.
  const bool all_submitted = decision.joined.empty();
  const std::vector<uint64_t>& rows = decision.rows;
  const bool equal_rows = std::all_of(rows.begin(), rows.end(), [&](uint64_t n) { return n == rows.front(); });
  std::vector<Way> ways{Way::kStaged};
  if ((a.flags & kFlagByLibrary) != 0 && all_submitted && equal_rows) {
    DDL_RETURN_IF_ERROR(request.staging->failure());
    DDL_RETURN_IF_ERROR(FindWays(device, a.kind, &ways));
  }
  if (ways.size() == 1) return RunBy(ways[0], request, decision);
  WayChoice& choice = device.choice(a.kind, a.count * DtypeSize(static_cast<ddl_dtype>(a.dtype)));
  if (choice.chosen() != Way::kUnknown) return RunBy(choice.chosen(), request, decision);
  return TimeWays(choice, ways, request, decision);
}

// The ways that all ranks can take for this kind. Connects the groups that they need.
Status Executor::FindWays(Device& device, uint32_t kind, std::vector<Way>* ways) {
  ways->clear();
  for (const auto& [group, way] : {std::pair(DDL_ALL_RANKS, Way::kLibrary), {DDL_HOST_RANKS, Way::kHierarchical}}) {
    if (way == Way::kHierarchical && kind != DDL_ALL_REDUCE) continue;
    if (device.group(group).state == DeviceGroup::kUnconnected) DDL_RETURN_IF_ERROR(ConnectGroup(device, group));
    if (device.group(group).state == DeviceGroup::kConnected) ways->push_back(way);
  }
  if (device.chooses || ways->empty()) ways->push_back(Way::kStaged);
  return {};
}

// Ranks agree whether all of them could connect. If not, all continue without the group.
Status Executor::ConnectGroup(Device& device, ddl_device_group group) {
  const double start = Now();
  Status connected = device.Connect(group);
  enum : int32_t { kDone, kUnderWay, kFailed } state = kUnderWay;
  // The library does not tell a waiting rank that another rank has failed.
  for (int32_t worst = kUnderWay; worst == kUnderWay;) {
    bool ready = false;
    if (connected.ok()) connected = device.WaitUntilReady(group, waiter_, "connecting", kConnectSliceSeconds, &ready);
    const double limit = device.required ? kRequiredConnectSeconds : kConnectSeconds;
    if (connected.ok() && !ready && Now() - start > limit) {
      connected = {DDL_INTERNAL, std::string(device.table().name) + ": connecting takes too long"};
    }
    state = !connected.ok() ? kFailed : ready ? kDone : kUnderWay;
    worst = state;
    const View view(sizeof worst, &worst, 1);
    DDL_RETURN_IF_ERROR(collectives_.AllReduce(view, view, DDL_INT32, DDL_MAX));
    if (worst == kDone) {
      device.group(group).state = DeviceGroup::kConnected;
      return {};
    }
  }
  device.Disconnect(group, true);
  const std::string why = connected.ok() ? "another rank's device could not connect" : connected.message();
  if (device.required) return {DDL_INTERNAL, why};
  warning_ += why +
              ". Collectives on devices do without it, and pass through the memory of the host where no other "
              "library connects their ranks.";
  return {};
}

// Runs the request in the way whose turn it is. After the last turn, ranks agree on the fastest way.
Status Executor::TimeWays(WayChoice& choice, const std::vector<Way>& ways, const Request& request,
                          const Decision& decision) {
  // Not the time in which this rank's stream or another rank is late.
  DDL_RETURN_IF_ERROR(request.staging->WaitUntilReady(waiter_));
  int32_t ready = 1;
  const View arrival(sizeof ready, &ready, 1);
  DDL_RETURN_IF_ERROR(collectives_.AllReduce(arrival, arrival, DDL_INT32, DDL_MIN));
  const double start = Now();
  DDL_RETURN_IF_ERROR(RunBy(choice.Next(ways), request, decision));
  if (!choice.Record(ways, Now() - start)) return {};
  const View slowest(sizeof(double), choice.seconds().data(), choice.seconds().size());
  DDL_RETURN_IF_ERROR(collectives_.AllReduce(slowest, slowest, DDL_FLOAT64, DDL_MAX));
  choice.Choose();
  return {};
}

Status Executor::RunBy(Way way, const Request& request, const Decision& decision) {
  const Status status = way == Way::kLibrary ? RunByLibrary(request, decision)
                        : way == Way::kHierarchical
                            ? RunHierarchical(request)
                            : request.staging->Run(request, transport_.rank, waiter_, [&](const Request& on_host) {
                                return RunWithMemory(on_host, decision);
                              });
  if (status.ok()) {
    request.staging->device()->num_run[static_cast<size_t>(way)].fetch_add(1, std::memory_order_relaxed);
  }
  return status;
}

Status Executor::RunByLibrary(const Request& request, const Decision& decision) {
  const Announcement& a = request.announcement;
  std::vector<ddl_buffer> buffers = request.buffers;
  if (a.kind == DDL_ALL_GATHER) {
    char* out = nullptr;
    DDL_RETURN_IF_ERROR(AllocateRows(request, decision.rows, &out));
    DDL_RETURN_IF_ERROR(request.staging->Mark());
    buffers[0].out = out;
  } else if (a.kind == DDL_REDUCE_SCATTER) {
    buffers[0].count /= static_cast<uint64_t>(transport_.size);
  }
  return RunLibrary(DDL_ALL_RANKS, static_cast<ddl_kind>(a.kind), request, buffers, request.staging->ready());
}

// An all-reduce. Each buffer is cut into a share for each rank of the host. The library sums the shares inside the
// host, every rank sends its own around the rings between hosts, and the library gathers them. The elements that are
// left over, fewer than the host has ranks, are summed on every rank of the host, which all send them: their rings add
// in the same order.
Status Executor::RunHierarchical(const Request& request) {
  const Announcement& a = request.announcement;
  const std::shared_ptr<Device>& device = request.staging->device();
  const DeviceGroup& host = device->group(DDL_HOST_RANKS);
  const auto ranks = static_cast<uint64_t>(host.size);
  const auto dtype = static_cast<ddl_dtype>(a.dtype);
  const size_t element = DtypeSize(dtype);
  std::vector<ddl_buffer> shares, rests, gathered;
  Request between = request;  // of this rank's parts, with the other hosts
  between.buffers.clear();
  for (const ddl_buffer& buffer : request.buffers) {
    const uint64_t share = buffer.count / ranks;
    const uint64_t rest = buffer.count % ranks;
    void* const own = At(buffer.out, static_cast<uint64_t>(host.rank) * share * element);
    const uint64_t end = ranks * share * element;
    shares.push_back({buffer.in, own, share, buffer.location});
    rests.push_back({At(buffer.in, end), At(buffer.out, end), rest, buffer.location});
    gathered.push_back({own, buffer.out, share, buffer.location});
    if (share > 0) between.buffers.push_back({own, own, share, buffer.location});
    if (rest > 0) between.buffers.push_back({rests.back().out, rests.back().out, rest, buffer.location});
  }
  const DeviceEvent& ready = request.staging->ready();
  DDL_RETURN_IF_ERROR(RunLibrary(DDL_HOST_RANKS, DDL_REDUCE_SCATTER, request, shares, ready));
  DDL_RETURN_IF_ERROR(RunLibrary(DDL_HOST_RANKS, DDL_ALL_REDUCE, request, rests, ready));
  Staging parts(device);
  DDL_RETURN_IF_ERROR(parts.Run(between, transport_.rank, waiter_, [&](const Request& on_host) {
    View data(element);
    for (const ddl_buffer& buffer : on_host.buffers) data.Add(buffer.out, buffer.count);
    return collectives_.AllReduceBetween(data, dtype, static_cast<ddl_op>(a.op));
  }));
  return RunLibrary(DDL_HOST_RANKS, DDL_ALL_GATHER, request, gathered, {});
}

// Runs a collective of the library with the dtype, op and root of `request`, if `buffers` have any elements.
Status Executor::RunLibrary(ddl_device_group group, ddl_kind kind, const Request& request,
                            const std::vector<ddl_buffer>& buffers, const DeviceEvent& after) {
  const Announcement& a = request.announcement;
  if (std::all_of(buffers.begin(), buffers.end(), [](const ddl_buffer& buffer) { return buffer.count == 0; }))
    return {};
  const ddl_device_collective collective{kind,          a.dtype, a.op, a.root, static_cast<uint32_t>(buffers.size()),
                                         buffers.data()};
  const Status status = request.staging->device()->Run(group, collective, after, waiter_);
  // The library notices that a rank has died, but does not name it. The host's own checks name it a moment later.
  for (const double start = Now(); !status.ok() && Now() - start < kLostRankSeconds; usleep(kLostRankPollUs)) {
    DDL_RETURN_IF_ERROR(waiter_.Health());
  }
  return status;
}

}  // namespace ddl
