#include "scale/world.h"

#include <sys/mman.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace scale {

// A receive in progress. A send completes at once, and its operation is null.
struct Operation {
  int peer;
  int tag;
  void* buffer;
  bool arrived;
  uint64_t depth;
};

namespace {

// Completes receives, in the order of posting, with the oldest messages of their senders. Messages sent
// in this round have not arrived yet.
void Match(const End& me, int tag) {
  Network::Channel& channel = me.network->channels[static_cast<size_t>(me.rank)][tag];
  auto& receives = channel.receives;
  for (auto at = receives.begin(); at != receives.end();) {
    Operation& receive = **at;
    const auto from_peer = [&](const auto& sent) { return sent.source == receive.peer; };
    const auto found = std::find_if(channel.sent.begin(), channel.sent.end(), from_peer);
    if (found == channel.sent.end() || found->round == me.network->round) {
      ++at;
      continue;
    }
    std::memcpy(receive.buffer, found->bytes.data(), found->bytes.size());
    receive.depth = found->depth;
    receive.arrived = true;
    channel.sent.erase(found);
    at = receives.erase(at);
  }
}

}  // namespace

double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void Must(const ddl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "scale: %s\n", status.message().c_str());
  std::exit(1);
}

ddl_transport TransportOf(End* end, int size) {
  ddl_transport transport{};
  transport.abi_version = DDL_ABI_VERSION;
  transport.rank = end->rank;
  transport.size = size;
  transport.self = end;
  transport.isend = [](void* self, int peer, int tag, const void* buffer, size_t bytes, void** operation) {
    const End& me = *static_cast<End*>(self);
    Network& net = *me.network;
    const auto from = static_cast<size_t>(me.rank);
    const auto to = static_cast<size_t>(peer);
    net.channels[to][tag].sent.push_back(
        {me.rank, {static_cast<const char*>(buffer), bytes}, net.depth[from] + 1, net.round});
    for (const size_t rank : {from, to}) {
      ++net.at[rank];
      net.bytes_at[rank] += bytes;
    }
    *operation = nullptr;
    return static_cast<int>(DDL_OK);
  };
  transport.irecv = [](void* self, int peer, int tag, void* buffer, size_t, void** operation) {
    auto* const receive = new Operation{peer, tag, buffer, false, 0};
    const End& me = *static_cast<End*>(self);
    me.network->channels[static_cast<size_t>(me.rank)][tag].receives.push_back(receive);
    Match(me, tag);
    *operation = receive;
    return static_cast<int>(DDL_OK);
  };
  transport.test = [](void* self, void** operation, int* finished) {
    const End& me = *static_cast<End*>(self);
    auto* const receive = static_cast<Operation*>(*operation);
    *finished = 1;
    if (receive == nullptr) return static_cast<int>(DDL_OK);
    if (!receive->arrived) Match(me, receive->tag);
    *finished = receive->arrived ? 1 : 0;
    if (!receive->arrived) return static_cast<int>(DDL_OK);
    uint64_t& depth = me.network->depth[static_cast<size_t>(me.rank)];
    depth = std::max(depth, receive->depth);
    delete receive;
    *operation = nullptr;
    return static_cast<int>(DDL_OK);
  };
  transport.cancel = [](void*, void**) { return static_cast<int>(DDL_OK); };
  transport.probe = [](void* self, int tag, int* peer, size_t* bytes) {
    const End& me = *static_cast<End*>(self);
    const auto& queue = me.network->channels[static_cast<size_t>(me.rank)][tag].sent;
    const bool any = !queue.empty() && queue.front().round != me.network->round;
    *peer = any ? queue.front().source : -1;
    *bytes = any ? queue.front().bytes.size() : 0;
    return static_cast<int>(DDL_OK);
  };
  transport.last_error = [](void*) { return "no error"; };
  // Unused pages take no memory, as in production.
  transport.share = [](void* self, int leader, size_t bytes) -> void* {
    void*& block = static_cast<End*>(self)->network->blocks[leader];
    if (block == nullptr) {
      block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (block == MAP_FAILED) return nullptr;
    }
    return block;
  };
  transport.all_gather = [](void*, const void* in, void* out, size_t bytes) {
    std::memcpy(out, in, bytes);
    return static_cast<int>(DDL_OK);
  };
  transport.destroy = [](void*) {};
  return transport;
}

std::vector<ddl::Announcement> SumsOf(int buckets, uint64_t step) {
  std::vector<ddl::Announcement> sums;
  for (int bucket = 0; bucket < buckets; ++bucket) {
    ddl::Announcement& a = sums.emplace_back();
    a.kind = DDL_ALL_REDUCE;
    a.count = 6'250'000;
    a.fingerprint = 12345;
    a.step = step;
    a.name = "functional/train_step/3f9a0c21/sum_" + std::to_string(bucket);
    a.detail = "float32[1024,4096], float32[4096], float32[1024,1953]";
  }
  return sums;
}

ddl::Announcement RowsOf(uint64_t step) {
  ddl::Announcement a;
  a.kind = DDL_ALL_GATHER;
  a.dtype = DDL_INT64;
  a.row_count = 42;
  a.rows = 1;
  a.count = 42;
  a.step = step;
  a.name = "functional/train_step/rows";
  a.detail = "int64[1,42]";
  return a;
}

}  // namespace scale
