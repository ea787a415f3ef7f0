// ddl_host.h: a transport that needs no MPI: between processes of one host by UNIX datagram sockets, between hosts by
// stream sockets that the caller has connected.
//
// The ranks of a host share a directory that belongs to their user and that nobody else may enter (mode 0700): the
// kernel then lets nobody else send to their sockets, which have their names there. Nothing here listens on a network.
//
// A rank that dies takes nothing with it but its own socket. What is sent to it from then on counts as sent, as a small
// message does in MPI; that it is gone is for others to find (liveness/). Sockets of other ranks, and other transports
// in the same directory, go on: ranks that are left make a new transport among themselves.
#ifndef KERAS_DDL_DDL_HOST_H_
#define KERAS_DDL_DDL_HOST_H_

#include "ddl.h"

#ifdef __cplusplus
extern "C" {
#endif

// Fills *out for rank `rank` of `size`, which all open the same `directory` with the same `key` (a part of a file name,
// 1 to 64 bytes). Not collective: returns at once. Messages to ranks that have not opened theirs wait here until they
// have. A `key` must not be used again while an earlier transport of that name is open on any rank.
//
// The functions of *out: as ddl.h says. `all_gather` and `plain_all_reduce` wait for all ranks, and fail with
// DDL_ABORTED when one of them closes or dies meanwhile. Messages of any length; a receiver that does not ask for one
// has it in its own memory. `destroy` waits up to 0.2 s for messages that were not handed over.
DDL_EXPORT int ddl_host_open(const char* directory, const char* key, int rank, int size, ddl_transport* out,
                             char* error, size_t error_bytes);

// Rank `peer` is on another host: takes over the connected, reliable stream socket `socket`, of which it has the other
// end, and of which nothing has been read. Before the first message to or from `peer`.
//
// A peer that dies ends its stream: then receives from it, and every `probe`, fail with DDL_ABORTED. A host that is
// gone does not: see SO_KEEPALIVE and TCP_USER_TIMEOUT.
DDL_EXPORT int ddl_host_connect(const ddl_transport* transport, int peer, int socket);

// all_gather that returns DDL_DEADLINE_EXCEEDED when it has not ended after `timeout_ms` (0 or more): call it again,
// with the same arguments, to wait on. Until then `arrived` says of each rank whether it has come (`size` bytes; may be
// NULL). No other function of the transport but `destroy` may be called between.
DDL_EXPORT int ddl_host_all_gather(const ddl_transport* transport, const void* in, void* out, size_t bytes,
                                   int timeout_ms, uint8_t* arrived);

// As `probe`, for messages from `source` only (-1: from any rank).
DDL_EXPORT int ddl_host_probe(const ddl_transport* transport, int source, int tag, int* peer, size_t* bytes);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // KERAS_DDL_DDL_HOST_H_
