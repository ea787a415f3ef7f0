// Message tags of the transport: one for each kind of traffic between two ranks of a communicator.
#ifndef KERAS_DDL_CORE_BASE_TAGS_H_
#define KERAS_DDL_CORE_BASE_TAGS_H_

namespace ddl {

enum Tag {
  kUpTag = 101,     // control/channel.h: to the coordinator
  kDownTag = 102,   // control/channel.h: from the coordinator
  kAbortTag = 103,  // control/channel.h: the communicator is broken
  kDataTag = 104,   // net/ring.h
  kBeatTag = 105,   // liveness/heartbeat.h
  kPlanTag = 106,   // engine/plan_lane.h
  kBlockTag = 200,  // hierarchy/hierarchical_collectives.cc: this and those after it, one for each block under way
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_TAGS_H_
