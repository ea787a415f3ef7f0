#include "thread_transport.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "kernels/kernels.h"

namespace ddl_test {
namespace {

struct Operation {
  bool finished = false;
  int code = DDL_OK;
  std::string error;
};

struct Send {
  std::shared_ptr<Operation> operation;
  std::vector<char> copy;  // eager
  const void* buffer;      // otherwise the sender's own
  size_t bytes;
  uint64_t arrival;
};

struct Receive {
  std::shared_ptr<Operation> operation;
  void* buffer;
  size_t bytes;
};

// Unreceived messages of one (source, destination, tag), and receives without a message.
struct Channel {
  std::deque<Send> sends;
  std::deque<Receive> receives;
};

struct FreeBlock {
  void operator()(void* block) const { std::free(block); }
};

// State shared by all ranks, guarded by `mutex`.
struct World {
  explicit World(int size_in) : size(size_in), parts(size_in) {}

  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t arrivals = 0;
  std::map<std::tuple<int, int, int>, Channel> channels;
  std::map<int, std::pair<size_t, std::unique_ptr<void, FreeBlock>>> blocks;  // by leader
  // A reusable barrier, and the pointers that ranks exchange between two barriers.
  int waiting = 0;
  uint64_t generation = 0;
  std::vector<const void*> parts;

  void Barrier(std::unique_lock<std::mutex>& lock) {
    const uint64_t mine = generation;
    if (++waiting == size) {
      waiting = 0;
      ++generation;
      changed.notify_all();
    } else {
      changed.wait(lock, [&] { return generation != mine; });
    }
  }
};

struct Rank {
  std::shared_ptr<World> world;
  int rank;
  std::string error;
  // Operations that callers hold, by address. Operations of a collective that was broken off never finish;
  // they are freed with the transport, as ddl.h promises.
  std::map<void*, std::shared_ptr<Operation>> operations;

  void* Hold(const std::shared_ptr<Operation>& operation) {
    operations[operation.get()] = operation;
    return operation.get();
  }
  int Fail(std::string message) {
    error = std::move(message);
    return DDL_INTERNAL;
  }
};

// Called by the destination, because only it writes into its buffers.
void Match(Channel& channel) {
  while (!channel.sends.empty() && !channel.receives.empty()) {
    const Send send = std::move(channel.sends.front());
    const Receive receive = std::move(channel.receives.front());
    channel.sends.pop_front();
    channel.receives.pop_front();
    if (send.bytes > receive.bytes) {
      receive.operation->code = DDL_INTERNAL;
      receive.operation->error =
          "a message of " + std::to_string(send.bytes) + " bytes came for a buffer of " + std::to_string(receive.bytes);
    } else if (send.bytes > 0) {
      std::memcpy(receive.buffer, send.buffer == nullptr ? send.copy.data() : send.buffer, send.bytes);
    }
    send.operation->finished = receive.operation->finished = true;
  }
}

int AllGather(void* self, const void* in, void* out, size_t bytes) {
  Rank& me = *static_cast<Rank*>(self);
  World& world = *me.world;
  std::unique_lock<std::mutex> lock(world.mutex);
  world.parts[me.rank] = in;
  world.Barrier(lock);
  for (int r = 0; r < world.size && bytes > 0; ++r) {
    std::memcpy(static_cast<char*>(out) + r * bytes, world.parts[r], bytes);
  }
  world.Barrier(lock);
  return DDL_OK;
}

int Isend(void* self, int peer, int tag, const void* buffer, size_t bytes, void** operation) {
  Rank& me = *static_cast<Rank*>(self);
  if (peer < 0 || peer >= me.world->size) return me.Fail("isend: no rank " + std::to_string(peer));
  Send send{std::make_shared<Operation>(), {}, buffer, bytes, 0};
  if (bytes <= kEagerBytes) {
    const char* const first = static_cast<const char*>(buffer);
    if (bytes > 0) send.copy.assign(first, first + bytes);
    send.buffer = nullptr;
    send.operation->finished = true;
  }
  const std::lock_guard<std::mutex> lock(me.world->mutex);
  *operation = me.Hold(send.operation);
  send.arrival = me.world->arrivals++;
  me.world->channels[{me.rank, peer, tag}].sends.push_back(std::move(send));
  return DDL_OK;
}

int Irecv(void* self, int peer, int tag, void* buffer, size_t bytes, void** operation) {
  Rank& me = *static_cast<Rank*>(self);
  if (peer < 0 || peer >= me.world->size) return me.Fail("irecv: no rank " + std::to_string(peer));
  const std::lock_guard<std::mutex> lock(me.world->mutex);
  Channel& channel = me.world->channels[{peer, me.rank, tag}];
  channel.receives.push_back({std::make_shared<Operation>(), buffer, bytes});
  *operation = me.Hold(channel.receives.back().operation);
  Match(channel);
  return DDL_OK;
}

int Test(void* self, void** operation, int* finished) {
  Rank& me = *static_cast<Rank*>(self);
  *finished = 1;
  if (*operation == nullptr) return DDL_OK;  // like MPI_REQUEST_NULL
  const std::lock_guard<std::mutex> lock(me.world->mutex);
  for (auto& [key, channel] : me.world->channels) {
    if (std::get<1>(key) == me.rank) Match(channel);
  }
  const auto held = me.operations.find(*operation);
  if (held == me.operations.end()) return me.Fail("test: no such operation");
  if (!held->second->finished) {
    *finished = 0;
    return DDL_OK;
  }
  const int code = held->second->code;
  if (code != DDL_OK) me.error = held->second->error;
  me.operations.erase(held);
  *operation = nullptr;
  return code;
}

int Cancel(void* self, void** operation) {
  Rank& me = *static_cast<Rank*>(self);
  const std::lock_guard<std::mutex> lock(me.world->mutex);
  const auto held = me.operations.find(*operation);
  if (held == me.operations.end()) return me.Fail("cancel: no such operation");
  const auto same = [&](const auto& message) { return message.operation == held->second; };
  for (auto& [key, channel] : me.world->channels) {
    if (std::get<0>(key) == me.rank) {
      channel.sends.erase(std::remove_if(channel.sends.begin(), channel.sends.end(), same), channel.sends.end());
    }
    if (std::get<1>(key) == me.rank) {
      channel.receives.erase(std::remove_if(channel.receives.begin(), channel.receives.end(), same),
                             channel.receives.end());
    }
  }
  me.operations.erase(held);
  *operation = nullptr;
  return DDL_OK;
}

int Probe(void* self, int tag, int* peer, size_t* bytes) {
  Rank& me = *static_cast<Rank*>(self);
  const std::lock_guard<std::mutex> lock(me.world->mutex);
  *peer = -1;
  uint64_t first = UINT64_MAX;
  for (int source = 0; source < me.world->size; ++source) {
    const auto found = me.world->channels.find({source, me.rank, tag});
    if (found == me.world->channels.end()) continue;
    Match(found->second);
    if (found->second.sends.empty() || found->second.sends.front().arrival >= first) continue;
    first = found->second.sends.front().arrival;
    *peer = source;
    *bytes = found->second.sends.front().bytes;
  }
  return DDL_OK;
}

// Reduces over the ranks in their order, as the kernels do for one block of memory.
int PlainAllReduce(void* self, const void* in, void* out, uint64_t count, uint32_t dtype_number, uint32_t op_number) {
  Rank& me = *static_cast<Rank*>(self);
  World& world = *me.world;
  const auto dtype = static_cast<ddl_dtype>(dtype_number);
  const auto op = static_cast<ddl_op>(op_number);
  std::vector<char> result(count * ddl::DtypeSize(dtype));
  std::unique_lock<std::mutex> lock(world.mutex);
  world.parts[me.rank] = in;
  world.Barrier(lock);
  std::vector<const void*> parts = world.parts;
  lock.unlock();
  const bool widens = op == DDL_MEAN && dtype >= DDL_INT32;
  std::vector<std::vector<int64_t>> wide;
  if (widens && dtype != DDL_INT64) {
    for (const void*& part : parts) {
      wide.emplace_back(count);
      ddl::WidenToInt64(dtype, part, wide.back().data(), count);
      part = wide.back().data();
    }
  }
  if (widens) {
    std::vector<int64_t> sum(count);
    ddl::Reduce(DDL_INT64, DDL_SUM, parts.data(), world.size, sum.data(), count, 1, ddl::Store::kCached);
    ddl::DivideFromInt64(dtype, sum.data(), result.data(), count, world.size);
  } else {
    ddl::Reduce(dtype, op, parts.data(), world.size, result.data(), count, world.size, ddl::Store::kCached);
  }
  lock.lock();
  world.Barrier(lock);  // all have read `in`, which may be `out`
  if (!result.empty()) std::memcpy(out, result.data(), result.size());
  return DDL_OK;
}

const char* LastError(void* self) { return static_cast<Rank*>(self)->error.c_str(); }

void* Share(void* self, int leader, size_t bytes) {
  Rank& me = *static_cast<Rank*>(self);
  const std::lock_guard<std::mutex> lock(me.world->mutex);
  auto& [size, block] = me.world->blocks[leader];
  if (block == nullptr) {
    constexpr size_t kPage = 4096;
    size = bytes;
    const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    block.reset(std::aligned_alloc(kPage, rounded));
    if (block == nullptr) return nullptr;
    std::memset(block.get(), 0, rounded);
  }
  if (size != bytes) {
    me.Fail("share: rank " + std::to_string(me.rank) + " asks for " + std::to_string(bytes) +
            " bytes, another rank asked for " + std::to_string(size));
    return nullptr;
  }
  return block.get();
}

void Destroy(void* self) {
  Rank* const me = static_cast<Rank*>(self);
  {
    // Large messages that were never received point into this rank's memory, and so do receives.
    const std::lock_guard<std::mutex> lock(me->world->mutex);
    for (auto& [key, channel] : me->world->channels) {
      if (std::get<0>(key) == me->rank) {
        std::deque<Send> kept;
        for (Send& send : channel.sends) {
          if (send.buffer == nullptr) kept.push_back(std::move(send));
        }
        channel.sends = std::move(kept);
      }
      if (std::get<1>(key) == me->rank) channel.receives.clear();
    }
  }
  delete me;
}

}  // namespace

std::vector<ddl_transport> MakeThreadTransports(int size) {
  const auto world = std::make_shared<World>(size);
  std::vector<ddl_transport> transports;
  for (int r = 0; r < size; ++r) {
    transports.push_back({DDL_ABI_VERSION, r, size, new Rank{world, r, {}, {}}, AllGather, Isend, Irecv, Test, Cancel,
                          Probe, PlainAllReduce, LastError, nullptr, Share, Destroy});
  }
  return transports;
}

}  // namespace ddl_test
