// Layout: which ranks share memory and how their groups form a box, checked before anything is built on it.
#ifndef KERAS_DDL_CORE_HIERARCHY_LAYOUT_H_
#define KERAS_DDL_CORE_HIERARCHY_LAYOUT_H_

#include <cstdint>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

// Checks that `options` are valid for the transport's ranks and the same on all of them: the ABI version, group, outer,
// the bytes of a slot, and lost_after_s, which determines how often a rank must send a heartbeat. COLLECTIVE; fails on
// every rank or on none, with one message.
Status AgreeOnLayout(const ddl_transport& transport, const ddl_options& options);

// Bytes of a rank's slot (shm/group_memory.h): a multiple of 4096. REQUIRES: a valid group.
uint64_t SlotBytes(const ddl_options& options, int size);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_HIERARCHY_LAYOUT_H_
