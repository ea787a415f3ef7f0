// Heartbeat: how rank 0 and the groups on other machines learn that the other side has vanished: a host without power,
// a link that is down, a machine that stands still. Nothing else tells: a connection without traffic looks healthy.
//
// About once a second (more often where the limit is shorter than four seconds) one rank of each group on another
// machine than rank 0's, the lowest that lives, sends a byte to rank 0, and rank 0 answers. It happens on the
// communication thread, also in the middle of long collectives, and a side that was held up itself gives the other that
// time again. Processes of one machine are watched by the system (peer_watch.h), which is faster and never wrong; for
// them there are no heartbeats.
#ifndef KERAS_DDL_CORE_LIVENESS_HEARTBEAT_H_
#define KERAS_DDL_CORE_LIVENESS_HEARTBEAT_H_

#include <functional>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "ddl.h"
#include "liveness/places.h"
#include "net/owned_messages.h"
#include "shm/group_memory.h"

namespace ddl {

class Heartbeat {
 public:
  // `lost_after_s`: silence of this length means that the other side is lost; 0: there are no heartbeats. `has_left`:
  // whether a rank has said goodbye. All references must outlive this; so must this the transport.
  Heartbeat(const ddl_transport& transport, const GroupMemory& memory, const Places& places,
            const std::vector<int>& group, double lost_after_s, std::function<bool(int rank)> has_left);

  // Sends what is due and takes what has come. Cheap when called too often. DDL_ABORTED: names the ranks that are lost.
  Status Beat(double now);
  // The communication thread is about to be held up, or is so no more: the other side must not count the time.
  void SetBusy(bool busy);
  // Ends what is under way, as must be done before the transport is destroyed.
  void Cancel();
  // "No sign of life from rank(s) 4, 5 on host h2 for 6 s.", after a moment's silence only.
  std::string Silent(double now) const;

 private:
  struct Peer {
    Peer(const ddl_transport& transport, std::vector<int> ranks_in, int speaker_in)
        : ranks(std::move(ranks_in)), speaker(speaker_in), beat(transport) {}
    std::vector<int> ranks;  // whom silence is about: a group, or rank 0
    int speaker;             // whom to send to: who spoke last
    double heard = 0;
    double sent = 0;
    bool busy = false;
    OwnedMessages beat;  // one at a time
  };

  bool Speaks(double now) const;
  Status Receive(double now);
  Status Send(double now);

  const ddl_transport& transport_;
  const GroupMemory& memory_;
  const Places& places_;
  const double lost_after_s_;
  const double beat_s_;
  const std::function<bool(int)> has_left_;
  std::list<Peer> peers_;
  OwnedMessages receives_;
  bool busy_ = false;
  double looked_ = 0;
};

// Whether `block`'s rank has shown itself within the last moments, as every rank does many times a second.
bool ShowsLife(const RankBlock& block, double now);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_LIVENESS_HEARTBEAT_H_
