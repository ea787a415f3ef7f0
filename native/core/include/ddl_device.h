// ddl_device.h: a table of the functions that the core needs for a device whose memory the host cannot read. A library
// for one kind of device fills it in (native/cuda); the core knows no other way to a device.
//
// All functions may be called from any thread, several at a time, unless their comment says otherwise. Functions that
// return int return a ddl_code; `last_error` then says why. No function waits for the device or for another rank,
// unless its comment says so.
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

// One collective of the device's library, on device memory. Several buffers are reduced together.
typedef struct ddl_device_collective {
  uint32_t
      kind;  // ddl_kind: DDL_ALL_REDUCE, DDL_BROADCAST; DDL_REDUCE_SCATTER, DDL_ALL_GATHER: `count` is a rank's share
  uint32_t dtype;  // ddl_dtype
  uint32_t op;     // ddl_op: not DDL_ADASUM
  int32_t root;
  uint32_t num_buffers;
  const ddl_buffer* buffers;
} ddl_device_collective;

#define DDL_DEVICE_ID_BYTES 128  // bytes of an id that `make_id` makes

// The groups of ranks that the device's library may connect this rank to.
typedef enum ddl_device_group {
  DDL_ALL_RANKS = 0,   // of the communicator
  DDL_HOST_RANKS = 1,  // those that share memory with this one
  DDL_NUM_DEVICE_GROUPS = 2,
} ddl_device_group;

typedef struct ddl_device {
  uint32_t abi_version;
  ddl_location location;
  uint8_t uuid[16];         // of the device, the same in every process
  uint32_t library_shares;  // 1: its library takes several ranks on one device
  char name[96];            // for people: the device, and the version of its library of collectives
  void* self;

  // Host memory from a pool, which the device reads and writes at full speed. `release` gives it back.
  int (*reserve)(void* self, uint64_t bytes, void** memory);
  void (*release)(void* self, void* memory);
  // Events. `mark` makes an event for all work that `stream` has so far. `test` sets *done when that work is done.
  // `forget` gives an event back, done or not.
  int (*mark)(void* self, void* stream, void** event);
  int (*test)(void* self, void* event, int* done);
  void (*forget)(void* self, void* event);
  // Starts copies between host memory (from `reserve`) and device memory once `after` is done. *event is done when the
  // copies are. Copies in one direction run one after another, and at the same time as copies in the other direction.
  int (*copy)(void* self, int to_host, void* after, const ddl_device_copy* copies, uint32_t num_copies, void** event);

  // Collectives of the device's library (NCCL). All are NULL without the library. One thread at a time. `group` is a
  // ddl_device_group. `make_id` makes the id of a new group of ranks, on one of them. `connect` begins to connect this
  // rank. `run` starts a collective of the group once `after` is done. After either, `poll` sets *ready once the next
  // call may follow, and fails if the group has failed; `finish` then gives an event that is done when all collectives
  // so far are. `disconnect` leaves the group: running collectives end at once with `abort`, and may take a second
  // otherwise.
  int (*make_id)(void* self, void* id);
  int (*connect)(void* self, int group, const void* id, int rank, int size);
  int (*run)(void* self, int group, const ddl_device_collective* collective, void* after);
  int (*poll)(void* self, int group, int* ready);
  int (*finish)(void* self, void** event);
  void (*disconnect)(void* self, int group, int abort);

  // Text of the calling thread's last error; valid until its next call.
  const char* (*last_error)(void* self);
  // Frees everything, once. REQUIRES: no call runs, and none follows.
  void (*destroy)(void* self);
} ddl_device;

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // KERAS_DDL_DDL_DEVICE_H_
