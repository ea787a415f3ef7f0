#include "engine/engine.h"

#include <pthread.h>

#include <utility>

#include "base/failure.h"
#include "base/guard.h"
#include "engine/engine_block.h"
#include "engine/staging.h"

namespace ddl {
namespace {

// How many forks separate this process from the one that loaded the library: a child has the memory, but no
// communication thread.
std::atomic<uint32_t> forks{0};

Status ValidateLocations(const ddl_request& request, const Device* device) {
  for (uint32_t i = 0; request.kind != DDL_JOIN && i < request.num_buffers; ++i) {
    const ddl_location& location = request.buffers[i].location;
    if (location.kind == DDL_HOST || (device != nullptr && device->Has(location))) continue;
    const auto text = [](const ddl_location& at) { return "cuda:" + std::to_string(at.id); };
    return {DDL_INVALID_ARGUMENT, "location: buffers must lie in the host's memory or on the communicator's device (" +
                                      (device == nullptr ? "it has none" : text(device->table().location)) +
                                      "). Received: " + text(location) + "."};
  }
  return {};
}

}  // namespace

Status Engine::Create(const ddl_transport& transport, const ddl_options& options, std::unique_ptr<Engine>* out) {
  std::unique_ptr<Endpoint> endpoint;
  DDL_RETURN_IF_ERROR(Endpoint::Create(transport, options, &endpoint));
  std::unique_ptr<Engine> engine(new Engine(std::move(endpoint)));
  DDL_RETURN_IF_ERROR(engine->coordinated_.thread.Start());
  *out = std::move(engine);
  return {};
}

Engine::Engine(std::unique_ptr<Endpoint> endpoint)
    : coordinated_(std::move(endpoint)), description_(coordinated_.endpoint->Describe()) {
  static const int watching = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  (void)watching;
  forks_at_creation_ = forks;
}

Status Engine::AddLane(const ddl_transport& transport, const ddl_options& options) {
  if (planned_ != nullptr) {
    transport.destroy(transport.self);
    return {DDL_FAILED_PRECONDITION, "the communicator has a lane already"};
  }
  std::unique_ptr<Endpoint> endpoint;
  DDL_RETURN_IF_ERROR(Endpoint::Create(transport, options, &endpoint));
  auto planned = std::make_unique<Planned>(std::move(endpoint), coordinated_.endpoint->submissions());
  DDL_RETURN_IF_ERROR(planned->thread.Start());
  planned_ = std::move(planned);
  coordinated_.queue.SetPlanned(&planned_->queue);
  running_planned_.store(planned_.get(), std::memory_order_release);
  return {};
}

void Engine::Close() {
  if (planned_ != nullptr) planned_->thread.Close();
  coordinated_.queue.stack_position().Close();
  coordinated_.thread.Close();
  const std::shared_ptr<Device> device = this->device();
  if (device != nullptr) device->DisconnectAll(!coordinated_.endpoint->broken().ok());
}

Engine::Planned* Engine::planned() const {
  const std::shared_ptr<Device> device = this->device();
  if (device != nullptr && device->MayUseLibrary(DDL_ALL_REDUCE)) return nullptr;
  return running_planned_.load(std::memory_order_acquire);
}

bool Engine::Forked() const { return forks.load(std::memory_order_relaxed) != forks_at_creation_; }

void Engine::Submit(const ddl_request& from, bool result_on_host) {
  const std::shared_ptr<Device> device = this->device();
  Status status = Validate(from, size());
  if (status.ok()) status = ValidateLocations(from, device.get());
  if (!status.ok()) {
    CallDone(from.done, from.user, from.name, status);
    return;
  }
  // Before any lock, which a thread of the parent may have held when this process was forked: nobody would release it.
  if (Forked()) {
    const Status forked(DDL_NOT_FOUND, "this process was forked from a rank, and is not a rank itself");
    CallDone(from.done, from.user, from.name, forked);
    return;
  }
  auto request = std::make_unique<Request>();
  request->Describe(from, size());
  request->submitted = Now();
  request->result_on_host = result_on_host;
  if (IsOnDevice(from)) Stage(std::move(device), from, request.get());
  Planned* const lane = planned();
  if (lane != nullptr && (from.flags & DDL_FLAG_CANCELS) != 0) lane->queue.Suspend();
  if (lane == nullptr || from.plan_size == 0) {
    coordinated_.endpoint->submissions().Submit(std::move(request));
    return;
  }
  request->small = BytesOf(from) <= kEagerBytes;
  lane->queue.Submit(std::move(request));
}

// Copies a request's data to the host while it waits for its turn, unless the device's library is going to run it.
void Engine::Stage(std::shared_ptr<Device> device, const ddl_request& from, Request* request) const {
  const bool by_library = device->MayUseLibrary(from.kind) && LibraryCanRun(from, request->result_on_host, size());
  if (by_library) request->announcement.flags |= kFlagByLibrary;
  const bool copies = !by_library || device->WillStage(from.kind, BytesOf(from));
  request->staging = std::make_shared<Staging>(std::move(device), from.stream);
  if (copies) request->staging->CopyIn(*request, rank());
}

int Engine::TryRun(const ddl_request& request, uint32_t patience_us) {
  if (Forked()) return 0;  // see Submit
  Planned* const lane = request.plan_size > 0 ? planned() : nullptr;
  if (lane != nullptr && lane->queue.HasSmall()) return 0;
  const int ran = coordinated_.inline_path.TryRun(request, patience_us);
  if (ran != 0 && lane != nullptr) {
    // The request has run in any case. A run of the plan without the marker falls back to the coordinator.
    (void)Completes([&] { lane->queue.Skip({request.plan, request.plan_run, request.plan_index, request.plan_size}); });
  }
  return ran;
}

ddl_counters Engine::counters() const {
  const auto count = [](const ControlChannel& channel) {
    const MessageCount &sent = channel.sent(), &received = channel.received();
    return ddl_counters{sent.messages, received.messages, sent.bytes, received.bytes, 0, 0, 0, 0, 0, 0, 0};
  };
  ddl_counters all = count(coordinated_.endpoint->channel());
  all.coordinated = coordinated_.queue.num_decided();
  all.ran_inline = coordinated_.inline_path.num_run();
  if (const auto device = this->device(); device != nullptr) {
    all.by_device = device->num_run[static_cast<size_t>(Way::kLibrary)];
    all.hierarchical = device->num_run[static_cast<size_t>(Way::kHierarchical)];
    all.staged = device->num_run[static_cast<size_t>(Way::kStaged)];
  }
  const Planned* const lane = planned();
  if (lane == nullptr) return all;
  const ddl_counters own = count(lane->endpoint->channel());
  all.control_sent += own.control_sent;
  all.control_received += own.control_received;
  all.control_bytes_sent += own.control_bytes_sent;
  all.control_bytes_received += own.control_bytes_received;
  all.planned = lane->queue.num_run();
  all.fell_back = lane->queue.num_fallbacks();
  return all;
}

}  // namespace ddl
