// ddl_host.h: a transport that needs no MPI. It uses UNIX datagram sockets between processes of one host, and stream
// sockets that the caller has connected between hosts.
//
// The ranks of a host share a directory that belongs to their user and that nobody else may enter (mode 0700). Their
// sockets have names in it, so the kernel lets nobody else send to them. Nothing here listens on a network.
//
// A rank that dies only takes its own socket with it. Messages to it then count as sent, like small messages in MPI,
// and liveness/ finds out that it is gone. Sockets of other ranks, and other transports in the same directory, are not
// affected, so the remaining ranks can make a new transport among themselves.
#ifndef KERAS_DDL_DDL_HOST_H_
#define KERAS_DDL_DDL_HOST_H_

#include "ddl.h"

#ifdef __cplusplus
extern "C" {
#endif

// Fills *out for rank `rank` of `size`, which all open the same `directory` with the same `key` (a part of a file name,
// 1 to 64 bytes). Not collective: returns at once. Messages to ranks that have not opened their transport wait here
// until they have. A `key` must not be used again while an earlier transport of that name is open on any rank.
//
// ddl.h documents the functions of *out. `all_gather` and `plain_all_reduce` wait for all ranks, and fail with
// DDL_ABORTED if a rank closes or dies meanwhile. Messages may have any length; a message that its receiver has not
// asked for is kept in the receiver's memory. `destroy` waits up to 0.2 s for messages that were not handed over.
DDL_EXPORT int ddl_host_open(const char* directory, const char* key, int rank, int size, ddl_transport* out,
                             char* error, size_t error_bytes);

// For a rank `peer` on another host: takes over the connected, reliable stream socket `socket`, whose other end `peer`
// has and from which nothing has been read. Call it before the first message to or from `peer`.
//
// If a peer dies, its stream ends, and then receives from it and every `probe` fail with DDL_ABORTED. If a host is
// gone, streams do not end by themselves: see SO_KEEPALIVE and TCP_USER_TIMEOUT.
DDL_EXPORT int ddl_host_connect(const ddl_transport* transport, int peer, int socket);

// An all_gather that returns DDL_DEADLINE_EXCEEDED if it has not ended after `timeout_ms` (0 or more). Call it again
// with the same arguments to continue waiting. Until it ends, `arrived` says for each rank whether it has come (`size`
// bytes; may be NULL). In between, only `destroy` may be called on the transport.
DDL_EXPORT int ddl_host_all_gather(const ddl_transport* transport, const void* in, void* out, size_t bytes,
                                   int timeout_ms, uint8_t* arrived);

// Like `probe`, but only for messages from `source` (-1: from any rank).
DDL_EXPORT int ddl_host_probe(const ddl_transport* transport, int source, int tag, int* peer, size_t* bytes);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // KERAS_DDL_DDL_HOST_H_
