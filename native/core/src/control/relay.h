// Relay: what a rank that passes on messages of others (tree.h) does with what they announce. It holds announcements
// back until all ranks behind it have announced the same collective, and then sends one message for all of them, or, if
// they differ, one for all that are alike: the coordinator sees what every rank has said, and errors are the same as
// without a relay. What does not come together within kPatienceSeconds goes on as it is, so that the coordinator knows
// who is missing; what then comes late goes on at once. Pure logic, no clock of its own.
//
// Of one rank and one name, announcements go on in the order in which they came; of different names in any.
#ifndef KERAS_DDL_CORE_CONTROL_RELAY_H_
#define KERAS_DDL_CORE_CONTROL_RELAY_H_

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/message.h"
#include "control/tree.h"

namespace ddl {

class Relay {
 public:
  static constexpr double kPatienceSeconds = 0.05;

  // `tree` must outlive this.
  explicit Relay(const ControlTree& tree);

  // Some of the ranks behind this one, or itself, have announced this. `now` never decreases between calls.
  void Add(AlikeAnnouncements alike, double now);
  // A decision has come for some of these ranks. REQUIRES: before it is passed on to them.
  void OnDecision(const Decision& decision);
  // Sends on what has waited too long. Call it every few tens of milliseconds while `holds` is true.
  void Tick(double now);
  bool holds() const { return num_held_ > 0; }
  // What is to be sent to the parent, in order, since the last call.
  std::vector<std::string> TakeMessages();

 private:
  // Shared by the ranks that came in one message. `contents`: what must be equal to go in one message.
  struct Source {
    AlikeAnnouncements alike;
    std::string contents;
  };
  struct Held {
    std::shared_ptr<const Source> source;
    size_t index;  // in its ranks
  };
  struct Entry {
    std::vector<std::list<Held>> by_place;  // FIFO per rank, in the order of the tree's ranks; a list: see Coordinator
    std::vector<uint32_t> owed;             // others of the same collective have gone on without this rank
    size_t present = 0;                     // ranks that hold something here
    uint64_t num_owed = 0;
    double since = 0;
  };
  using Entries = std::map<std::string, Entry>;

  const std::string& NameOf(const AlikeAnnouncements& alike) const;
  // Sends the oldest of each rank that is there; those that are not will be late.
  void SendOldest(Entry& entry);
  void SendEverything(Entry& entry);
  // One message for those that are alike.
  void Send(const std::vector<Held>& together);
  void Forget(Entries::iterator at);

  const ControlTree& tree_;
  std::vector<int> place_of_;  // in the tree's ranks, by rank
  std::vector<bool> joined_;   // by place
  size_t num_joined_ = 0;
  size_t num_held_ = 0;
  Entries entries_;
  std::unordered_map<uint32_t, std::string> names_;  // of ids
  std::vector<std::string> messages_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_RELAY_H_
