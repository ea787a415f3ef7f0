// ddl_device.h: what the core needs of a device whose memory the host cannot read, as a table of functions. A library
// for one kind of device fills it in (native/cuda); the core knows no other way to a device.
//
// All functions may be called from any thread, several at a time, unless said otherwise. Those that return int return a
// ddl_code; `last_error` then says why. None waits for the device or for another rank, unless said otherwise.
#ifndef KERAS_DDL_DDL_DEVICE_H_
#define KERAS_DDL_DDL_DEVICE_H_

#include "ddl.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ddl_device_copy {
  const void* from;
  void* to;
  uint64_t bytes;
} ddl_device_copy;

// One collective of the device's library; its memory lies on the device. Several buffers are reduced together.
typedef struct ddl_device_collective {
  uint32_t
      kind;  // ddl_kind: DDL_ALL_REDUCE, DDL_BROADCAST; DDL_REDUCE_SCATTER, DDL_ALL_GATHER: `count` is a rank's share
  uint32_t dtype;  // ddl_dtype
  uint32_t op;     // ddl_op: not DDL_ADASUM
  int32_t root;
  uint32_t num_buffers;
  const ddl_buffer* buffers;
} ddl_device_collective;

#define DDL_DEVICE_ID_BYTES 128  // of what `make_id` makes

typedef struct ddl_device {
  uint32_t abi_version;
  ddl_location location;
  uint8_t uuid[16];         // of the device, the same in every process
  uint32_t library_shares;  // 1: its library takes several ranks on one device
  char name[96];            // for people: the device, and the version of its library of collectives
  void* self;

  // Memory of the host that the device reads and writes at full speed, from a pool. `release` gives it back.
  int (*reserve)(void* self, uint64_t bytes, void** memory);
  void (*release)(void* self, void* memory);
  // Events. `mark`: all work that `stream` has so far. `test`: *done when it is done. An event is given back by
  // `forget`, done or not.
  int (*mark)(void* self, void* stream, void** event);
  int (*test)(void* self, void* event, int* done);
  void (*forget)(void* self, void* event);
  // Starts copies, between memory of the host (from `reserve`) and of the device, once `after` is done. *event: they
  // are. Copies in one direction are made one after another, beside those in the other.
  int (*copy)(void* self, int to_host, void* after, const ddl_device_copy* copies, uint32_t num_copies, void** event);

  // Collectives of the device's library (NCCL). All NULL where it is not there. By one thread at a time.
  // `make_id`: the id of a new group of ranks, on one of them. `connect` begins to connect this rank. `run` starts a
  // collective once `after` is done. After both, `poll` sets *ready once the next call may follow, and fails when the
  // group has failed; `finish` then gives the event that all collectives so far are done. `disconnect` leaves: what
  // runs is ended at once if `abort`, and may take a second otherwise.
  int (*make_id)(void* self, void* id);
  int (*connect)(void* self, const void* id, int rank, int size);
  int (*run)(void* self, const ddl_device_collective* collective, void* after);
  int (*poll)(void* self, int* ready);
  int (*finish)(void* self, void** event);
  void (*disconnect)(void* self, int abort);

  // Text of the calling thread's last error; valid until its next call.
  const char* (*last_error)(void* self);
  // Frees everything, once. REQUIRES: no call runs, and none follows.
  void (*destroy)(void* self);
} ddl_device;

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // KERAS_DDL_DDL_DEVICE_H_
