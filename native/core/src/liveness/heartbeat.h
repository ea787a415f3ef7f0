// Heartbeat: how rank 0 and the groups on other machines detect that the other side is gone: a host without power, a
// link that is down, a frozen machine. Nothing else reveals it, because a connection without traffic looks healthy.
//
// About once a second (more often if the limit is shorter than four seconds), the lowest living rank of each group on
// another machine than rank 0's sends a byte to rank 0, and rank 0 answers. This happens on the communication thread,
// also during long collectives. A side that was stalled itself gives the other side that much more time. Processes on
// one machine are watched through the operating system (peer_watch.h), which is faster and never wrong, so they send no
// heartbeats.
#ifndef KERAS_DDL_CORE_LIVENESS_HEARTBEAT_H_
#define KERAS_DDL_CORE_LIVENESS_HEARTBEAT_H_

#include <functional>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "ddl.h"
#include "liveness/rank_locations.h"
#include "net/owned_messages.h"
#include "shm/group_memory.h"

namespace ddl {

class Heartbeat {
 public:
  // `lost_after_s`: silence of this length means that the other side is lost; 0: no heartbeats. `has_left`: whether a
  // rank has left in an orderly way. All references must outlive this.
  Heartbeat(const ddl_transport& transport, const GroupMemory& memory, const RankLocations& locations,
            const std::vector<int>& group, double lost_after_s, std::function<bool(int rank)> has_left);

  // Sends the beats that are due and receives those that have arrived. Cheap when called too often. DDL_ABORTED: names
  // the ranks that are lost.
  Status Beat(double now);
  // The communication thread is about to block for long (true), or no longer does (false): the other side must not
  // count this time.
  void SetBusy(bool busy);
  // Cancels messages in flight. Required before the transport is destroyed.
  void Cancel();
  // "No sign of life from rank(s) 4, 5 on host h2 for 6 s."; empty unless some peer has been silent for some seconds.
  // `ranks`: receives these ranks, too; may be NULL.
  std::string DescribeSilence(double now, FailedRanks* ranks) const;

 private:
  struct Peer {
    Peer(const ddl_transport& transport, std::vector<int> ranks_in, int contact_in)
        : ranks(std::move(ranks_in)), contact(contact_in), beat(transport) {}
    std::vector<int> ranks;  // the peer: a group, or rank 0
    int contact;             // the rank to send to: the one last heard from
    double last_received = 0;
    double last_sent = 0;
    bool busy = false;
    OwnedMessages beat;  // one at a time
  };

  bool IsSender(double now) const;
  Status Receive(double now);
  Status Send(double now);

  const ddl_transport& transport_;
  const GroupMemory& memory_;
  const RankLocations& locations_;
  const double lost_after_s_;
  const double beat_s_;
  const std::function<bool(int)> has_left_;
  std::list<Peer> peers_;
  OwnedMessages receives_;
  bool busy_ = false;
  double last_poll_ = 0;
};

// Whether `block`'s rank has been active in the last two seconds. Every rank records activity many times a second.
bool ShowsRecentActivity(const RankBlock& block, double now);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_LIVENESS_HEARTBEAT_H_
