// The C ABI over HostTransport. Like ddl.cc, it only translates calls and lets no exception out.
#include "ddl_host.h"

#include <cstdio>
#include <memory>

#include "base/guard.h"
#include "host/transport.h"

namespace {

using ddl::HostTransport;

// Runs `work`, which returns a Status, on the transport; returns its code and keeps its message.
template <typename Work>
int Run(void* self, Work work) {
  HostTransport& transport = *static_cast<HostTransport*>(self);
  return transport.Fail(ddl::GuardedStatus([&] { return work(transport); }));
}

HostTransport::Operation** Of(void** operation) { return reinterpret_cast<HostTransport::Operation**>(operation); }

int AllGather(void* self, const void* in, void* out, size_t bytes) {
  return Run(self, [&](HostTransport& transport) { return transport.AllGather(in, out, bytes, -1, nullptr); });
}

int Isend(void* self, int peer, int tag, const void* buffer, size_t bytes, void** operation) {
  return Run(self, [&](HostTransport& transport) { return transport.Isend(peer, tag, buffer, bytes, Of(operation)); });
}

int Irecv(void* self, int peer, int tag, void* buffer, size_t bytes, void** operation) {
  return Run(self, [&](HostTransport& transport) { return transport.Irecv(peer, tag, buffer, bytes, Of(operation)); });
}

int Test(void* self, void** operation, int* finished) {
  bool ended = false;
  const int code = Run(self, [&](HostTransport& transport) { return transport.Test(Of(operation), &ended); });
  *finished = ended ? 1 : 0;
  return code;
}

int Cancel(void* self, void** operation) {
  return Run(self, [&](HostTransport& transport) { return transport.Cancel(Of(operation)); });
}

int Probe(void* self, int tag, int* peer, size_t* bytes) {
  return Run(self, [&](HostTransport& transport) { return transport.Probe(-1, tag, peer, bytes); });
}

int PlainAllReduce(void* self, const void* in, void* out, uint64_t count, uint32_t dtype, uint32_t op) {
  return Run(self, [&](HostTransport& transport) {
    return transport.AllReduce(in, out, count, static_cast<ddl_dtype>(dtype), static_cast<ddl_op>(op));
  });
}

const char* LastError(void* self) { return static_cast<HostTransport*>(self)->error().c_str(); }

int LostRank(void* self) { return static_cast<HostTransport*>(self)->lost_rank(); }

void Destroy(void* self) { delete static_cast<HostTransport*>(self); }

}  // namespace

int ddl_host_open(const char* directory, const char* key, int rank, int size, ddl_transport* out, char* error,
                  size_t error_bytes) {
  std::unique_ptr<HostTransport> transport;
  const ddl::Status opened = ddl::GuardedStatus([&] {
    transport = std::make_unique<HostTransport>(rank, size);
    return transport->Open(directory, key);
  });
  if (!opened.ok()) {
    if (error_bytes > 0) std::snprintf(error, error_bytes, "%s", opened.message().c_str());
    return opened.code();
  }
  *out = {DDL_ABI_VERSION, rank,  size,           transport.release(), AllGather, Isend,   Irecv,  Test,
          Cancel,          Probe, PlainAllReduce, LastError,           LostRank,  nullptr, Destroy};
  return DDL_OK;
}

int ddl_host_connect(const ddl_transport* transport, int peer, int socket) {
  return Run(transport->self, [&](HostTransport& self) { return self.Connect(peer, socket); });
}

int ddl_host_all_gather(const ddl_transport* transport, const void* in, void* out, size_t bytes, int timeout_ms,
                        uint8_t* arrived) {
  return Run(transport->self, [&](HostTransport& self) { return self.AllGather(in, out, bytes, timeout_ms, arrived); });
}

int ddl_host_probe(const ddl_transport* transport, int source, int tag, int* peer, size_t* bytes) {
  return Run(transport->self, [&](HostTransport& self) { return self.Probe(source, tag, peer, bytes); });
}
