// Carries control messages between this rank and its neighbours in the tree (control/tree.h), and between any rank and
// rank 0: through mailboxes in shared memory between neighbours of one group, otherwise as messages of the transport.
// Used by the communication thread only.
#ifndef KERAS_DDL_CORE_CONTROL_CHANNEL_H_
#define KERAS_DDL_CORE_CONTROL_CHANNEL_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/tree.h"
#include "ddl.h"
#include "net/owned_messages.h"
#include "shm/group_memory.h"

namespace ddl {

// One entry of a mailbox: a message, or a piece of one that is too long for the mailbox.
struct MailboxPiece {
  std::string bytes;
  bool more;  // another piece of the same message follows
};

// False when it does not fit now. REQUIRES: bytes.size() + 4 <= kMailboxBytes.
bool MailboxPut(Mailbox& box, const MailboxPiece& piece);
// Appends what has arrived of the oldest message to `message`; true when it is complete.
bool MailboxTake(Mailbox& box, std::string* message);

// How many messages, and their bytes; read by any thread.
struct MessageCount {
  std::atomic<uint64_t> messages{0};
  std::atomic<uint64_t> bytes{0};
  void Add(size_t size) {
    messages.fetch_add(1, std::memory_order_relaxed);
    bytes.fetch_add(size, std::memory_order_relaxed);
  }
};

class ControlChannel {
 public:
  ControlChannel(const ddl_transport& transport, GroupMemory& memory, const ControlTree& tree);

  // Queues a message to rank `peer`: a neighbour in the tree, or any if either end is rank 0. Those of one pair of
  // ranks stay in order. Never blocks.
  void Send(int peer, std::string bytes);
  // Tells every rank outside this group that the communicator is broken (ranks inside see it from Send).
  void SendAbort(const std::string& bytes);

  using Received = OwnedMessages::Finished;
  // Sends what is queued, and appends what has arrived. PollAborts receives abort messages only, as a rank does during
  // a collective. Neither blocks: a large message whose sender stops half-way never arrives, and the sender counts as
  // missing as if it had sent nothing.
  Status Poll(std::vector<Received>* received);
  Status PollAborts(std::vector<Received>* received);
  // Cancels messages in flight. Required before the transport is destroyed.
  void Cancel();

  // Writes what waits for room in a mailbox; true when nothing is left.
  bool Flush();

  const MessageCount& sent() const { return sent_; }
  const MessageCount& received() const { return received_; }

  // True when a neighbour can only be reached (or reach us) through the transport, which does not ring our bell.
  bool NeedsPolling() const { return polls_; }
  // Whether everything has been sent, and whether nothing is partly received.
  bool Idle() const { return queued_.empty() && sends_.empty(); }
  bool NothingArriving() const { return receives_.empty() && aborts_.empty(); }

 private:
  bool IsLocal(int peer) const { return local_of_[static_cast<size_t>(peer)] >= 0; }
  bool leads() const { return memory_.local_rank() == 0; }
  // Whether messages to and from it go through mailboxes.
  bool HasMailbox(int peer) const { return mailboxes_ && IsLocal(peer); }
  Status PollAll(std::vector<Received>* received);
  bool TryPost(int peer, const MailboxPiece& piece);

  const ddl_transport& transport_;
  GroupMemory& memory_;
  std::vector<int> local_of_;  // local rank of each rank, -1 outside the group
  const int parent_;
  bool mailboxes_ = false;   // between the leader of this group and the others
  bool from_below_ = false;  // whether messages of the transport come from children
  bool from_above_ = false;  // or from the parent or rank 0
  bool polls_ = false;
  std::map<int, std::deque<MailboxPiece>> queued_;  // local peers whose mailbox was full
  std::vector<std::string> arriving_;  // by local rank of the sender (0: the leader): the beginning of a message
  OwnedMessages sends_;
  OwnedMessages receives_;
  OwnedMessages aborts_;  // received; separate, because nothing may delay them
  Status send_error_;
  MessageCount sent_;
  MessageCount received_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_CHANNEL_H_
