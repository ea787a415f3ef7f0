// ddl_add_device: ranks exchange their devices with collectives of the communicator itself, and agree on which groups
// of ranks the devices' library connects.
#include "ddl_device.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "api/comm.h"
#include "base/failure.h"
#include "base/guard.h"
#include "base/text.h"

namespace {

using ddl::Device;
using ddl::DeviceGroup;
using ddl::Status;

struct DeviceRecord {
  std::array<uint8_t, 16> uuid;
  uint32_t kind;
  uint32_t mode;
  uint32_t has_library;
  uint32_t shares;
};

// The bytes of every rank, one after another; `bytes` may differ between ranks.
Status Gather(ddl_comm* comm, const char* name, const void* data, size_t bytes, std::vector<char>* out) {
  const ddl_buffer buffer{data, nullptr, bytes, {}};
  ddl_request request{};
  request.kind = DDL_ALL_GATHER;
  request.dtype = DDL_UINT8;
  request.flags = DDL_FLAG_ALL_RANKS;
  request.num_buffers = 1;
  request.buffers = &buffer;
  request.row_count = 1;
  request.rows = bytes;
  request.name = name;
  request.detail = "ranks' devices";
  request.fingerprint = 0x64657669636573;  // no other collective of this name has it
  ddl_work* const work = ddl_start(comm, &request);
  if (work == nullptr) return ddl::OutOfMemory();
  ddl_work_wait(work, -1);
  Status status;
  if (const ddl_failure* const failure = ddl_work_failure(work)) {
    status = {static_cast<ddl_code>(failure->code), failure->message,
              ddl::FailedRanks(failure->ranks, failure->ranks + failure->num_ranks)};
  } else {
    const uint64_t* const rows = ddl_work_rows(work);
    uint64_t total = 0;
    for (int rank = 0; rank < ddl_size(comm); ++rank) total += rows[rank];
    const char* const from = static_cast<const char*>(ddl_work_data(work));
    out->assign(from, from + total);
  }
  ddl_work_free(work);
  return status;
}

// Why the library cannot connect these ranks; "": it can. The same on all ranks.
std::string WhyNotConnected(const std::vector<DeviceRecord>& records) {
  std::vector<int> without;
  std::set<std::array<uint8_t, 16>> uuids;
  bool all_share = true;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (records[rank].has_library == 0) without.push_back(static_cast<int>(rank));
    uuids.insert(records[rank].uuid);
    all_share = all_share && records[rank].shares != 0;
  }
  if (!without.empty()) {
    return "rank(s) " + ddl::FormatRanks(without) + " have no library of collectives for their device (NCCL)";
  }
  if (uuids.size() == records.size() || all_share) return "";
  return std::to_string(records.size()) + " ranks have " + std::to_string(uuids.size()) +
         " device(s), and the library needs one for each rank";
}

// Gives this rank's group the id that its leader makes. `leaders`: of all such groups, ascending.
Status ExchangeIds(ddl_comm* comm, const char* name, Device& device, const std::vector<int>& leaders, int leader,
                   DeviceGroup* group) {
  const bool leads = ddl_rank(comm) == leader;
  Status made;
  if (leads) made = device.As(device.table().make_id(device.table().self, group->id.data()), "making a group's id");
  std::vector<char> ids;
  DDL_RETURN_IF_ERROR(Gather(comm, name, group->id.data(), leads && made.ok() ? group->id.size() : 0, &ids));
  if (ids.size() != leaders.size() * group->id.size()) {
    return made.ok() ? Status(DDL_INTERNAL, "another rank could not make the id of a group of devices") : made;
  }
  const auto number = std::find(leaders.begin(), leaders.end(), leader) - leaders.begin();
  std::memcpy(group->id.data(), ids.data() + static_cast<size_t>(number) * group->id.size(), group->id.size());
  group->state = DeviceGroup::kUnconnected;
  return {};
}

Status AddDevice(ddl_comm* comm, std::shared_ptr<Device> device, uint32_t mode, const char* name) {
  const ddl_device& table = device->table();
  if (table.abi_version != DDL_ABI_VERSION) return {DDL_INTERNAL, "the library of the device is of another version"};
  if (comm->engine->device() != nullptr) {
    return {DDL_FAILED_PRECONDITION, "the communicator has a device already"};
  }
  DeviceRecord own{{}, table.location.kind, mode, table.connect != nullptr ? 1u : 0u, table.library_shares};
  std::memcpy(own.uuid.data(), table.uuid, own.uuid.size());
  std::vector<char> bytes;
  DDL_RETURN_IF_ERROR(Gather(comm, name, &own, sizeof own, &bytes));
  std::vector<DeviceRecord> records(static_cast<size_t>(ddl_size(comm)));
  std::memcpy(records.data(), bytes.data(), std::min(bytes.size(), records.size() * sizeof own));
  for (const DeviceRecord& record : records) {
    if (record.mode != mode || record.kind != own.kind) {
      return {DDL_FAILED_PRECONDITION,
              "ranks disagree on KERAS_DDL_DEVICE or on the kind of their devices. Received: " + std::to_string(mode) +
                  " and " + std::to_string(record.mode)};
    }
  }
  const std::vector<int>& leader_of = comm->engine->group();
  std::vector<int> leaders;
  bool even = true;
  for (int rank = 0; rank < ddl_size(comm); ++rank) {
    if (leader_of[static_cast<size_t>(rank)] != rank) continue;
    leaders.push_back(rank);
    even = even && std::count(leader_of.begin(), leader_of.end(), rank) == ddl_local_size(comm);
  }
  const bool several_hosts = leaders.size() > 1;
  std::string why = WhyNotConnected(records);
  if (mode == DDL_DEVICE_HIERARCHICAL && why.empty() && !even) {
    why = "hosts have different numbers of ranks, and KERAS_DDL_DEVICE=hierarchical needs equal ones";
  }
  device->required = mode == DDL_DEVICE_LIBRARY || mode == DDL_DEVICE_HIERARCHICAL;
  device->chooses = mode == DDL_DEVICE_AUTO && several_hosts;
  if (!why.empty() && device->required) return {DDL_INVALID_ARGUMENT, why};
  if (why.empty() && mode != DDL_DEVICE_STAGED) {
    DeviceGroup& all = device->group(DDL_ALL_RANKS);
    all.rank = ddl_rank(comm);
    all.size = ddl_size(comm);
    DeviceGroup& host = device->group(DDL_HOST_RANKS);
    host.rank = ddl_local_rank(comm);
    host.size = ddl_local_size(comm);
    if (mode != DDL_DEVICE_HIERARCHICAL || !several_hosts) {
      DDL_RETURN_IF_ERROR(ExchangeIds(comm, name, *device, {0}, 0, &all));
    }
    if (mode != DDL_DEVICE_LIBRARY && several_hosts && even && host.size > 1) {
      const int leader = leader_of[static_cast<size_t>(ddl_rank(comm))];
      DDL_RETURN_IF_ERROR(ExchangeIds(comm, name, *device, leaders, leader, &host));
    }
  }
  comm->engine->SetDevice(std::move(device));
  return {};
}

}  // namespace

int ddl_add_device(ddl_comm* comm, const ddl_device* device, uint32_t mode, const char* name, uint64_t* failure) {
  const Status status =
      ddl::GuardedStatus([&] { return AddDevice(comm, std::make_shared<Device>(*device), mode, name); });
  const ddl_failure failed = ddl::FailureOf(status, name);
  *failure = status.ok() ? 0 : ddl_keep_failure(&failed);
  return status.code();
}
