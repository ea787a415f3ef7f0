#include "engine/endpoint.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "hierarchy/layout.h"
#include "kernels/instruction_set.h"
#include "shm/peer_memory.h"

namespace ddl {

Status Endpoint::Create(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<Endpoint>* out) {
  Status status = AgreeOnLayout(transport, options);
  std::vector<int> group;
  std::unique_ptr<GroupMemory> memory;
  RankLocations locations;
  if (status.ok()) {
    group.assign(options.group, options.group + transport.size);
    status = GroupMemory::Create(transport, group, SlotBytes(options, transport.size), &memory);
  }
  if (status.ok()) status = PeerMemory::Probe(transport, options.staged_only == 0, *memory);
  if (status.ok()) status = RankLocations::Exchange(transport, &locations);
  if (!status.ok()) {
    transport.destroy(transport.self);
    return status;
  }
  out->reset(new Endpoint(transport, options, std::move(memory), std::move(locations), group));
  return {};
}

Endpoint::Endpoint(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<GroupMemory> memory,
                   RankLocations locations, const std::vector<int>& group)
    : transport_(transport),
      group_(group),
      deadline_s_(options.deadline_s),
      warn_after_s_(options.warn_after_s),
      warn_(options.warn),
      warn_user_(options.warn_user),
      memory_(std::move(memory)),
      locations_(std::move(locations)),
      submissions_(*memory_),
      peer_watch_(*memory_, locations_, transport.rank, [this](int rank) { return HasLeft(rank); }),
      channel_(transport_, *memory_),
      heartbeat_(transport_, *memory_, locations_, group, options.lost_after_s,
                 [this](int rank) { return HasLeft(rank); }),
      waiter_([this] { return Health(); }, options.deadline_s, memory_->local_size()),
      collectives_(transport_, *memory_, waiter_, group,
                   std::vector<int>(options.outer, options.outer + options.num_outer)),
      executor_(transport_, collectives_, waiter_, options.feedback_bytes),
      left_(static_cast<size_t>(transport.size), false) {
  if (options.warn_after_s <= 0) return;
  waiter_.SetWarning(options.warn_after_s,
                     [this](const std::string& waits_for, double seconds) { return WarnStalled(waits_for, seconds); });
}

void Endpoint::Close() {
  if (std::exchange(closed_, true)) return;
  submissions_.FreeMemory([this] { transport_.destroy(transport_.self); });
}

std::string Endpoint::Describe() const {
  return collectives_.Describe() + "; " + memory_->kind() + ", " + std::to_string(memory_->slot_bytes() / 1024) +
         " KiB slots" + (memory_->reachable() ? ", cross memory attach; " : "; ") + InstructionSetName();
}

template <typename Execute>
Status Endpoint::RunAs(const Announcement& announcement, Execute execute) {
  running_ = &announcement;
  heartbeat_.SetBusy((announcement.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK)) != 0);
  Status status = execute();
  running_ = nullptr;
  heartbeat_.SetBusy(false);
  if (const std::string warning = executor_.TakeWarning(); !warning.empty()) Warn(warning);
  if (status.ok() || status.code() == DDL_DATA_LOSS) return status;
  status = WithSuspects(status);
  Break(status);
  return status;
}

Status Endpoint::Run(const Request& request, const Decision& decision) {
  return RunAs(request.announcement, [&] { return executor_.Run(request, decision); });
}

Status Endpoint::RunJoined(const Decision& decision) {
  return RunAs(*decision.submitted, [&] { return executor_.RunJoined(decision); });
}

bool Endpoint::TakeMessages(const std::function<void(int peer, const std::string& bytes)>& handle) {
  std::vector<ControlChannel::Received> received = std::exchange(deferred_messages_, {});
  const Status status = channel_.Poll(&received);
  if (!status.ok()) Break(status);
  for (const auto& message : received) {
    if (TypeOf(message.bytes) != MessageType::kAbort) {
      handle(message.peer, message.bytes);
    } else if (broken_.ok()) {
      broken_ = DecodeReason(DecodeText(message.bytes));
      on_broken_(broken_);
    }
  }
  return !received.empty();
}

// During a collective messages stay unread, and a kLeave may be among them. So they are read here and handled later.
bool Endpoint::HasLeft(int rank) {
  if (left(rank)) return true;
  if (!channel_.Poll(&deferred_messages_).ok()) return false;
  return std::any_of(deferred_messages_.begin(), deferred_messages_.end(),
                     [rank](const ControlChannel::Received& message) {
                       return message.peer == rank && TypeOf(message.bytes) == MessageType::kLeave;
                     });
}

}  // namespace ddl
