// Carries control messages between this rank and the coordinator (rank 0): through mailboxes in shared memory if both
// are in one group, otherwise as messages of the transport. Used by the communication thread only.
#ifndef KERAS_DDL_CORE_CONTROL_CHANNEL_H_
#define KERAS_DDL_CORE_CONTROL_CHANNEL_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/mailbox.h"
#include "ddl.h"
#include "net/owned_messages.h"
#include "shm/group_memory.h"

namespace ddl {

// Counts messages and their bytes. Any thread may read it.
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
  ControlChannel(const ddl_transport& transport, GroupMemory& memory);

  // Queues a message to rank `peer`; either end of every message but an abort is rank 0. Never blocks.
  void Send(int peer, std::string bytes);
  // Tells every rank outside this group that the communicator is broken (ranks inside see it from Send).
  void SendAbort(const std::string& bytes);

  using Received = OwnedMessages::Finished;
  // Sends queued messages, and appends messages that have arrived. PollAborts, for use during a collective, only
  // receives abort messages. Neither blocks: if a sender stops in the middle of a large message, the message never
  // arrives, and the sender counts as missing.
  Status Poll(std::vector<Received>* received);
  Status PollAborts(std::vector<Received>* received);
  // Cancels messages in flight. Required before the transport is destroyed.
  void Cancel();

  // Writes messages that wait for room in a mailbox. Returns whether none is left.
  bool Flush();

  const MessageCount& sent() const { return sent_; }
  const MessageCount& received() const { return received_; }

  // True when some peer can only be reached (or reach us) through the transport, which does not ring our bell.
  bool NeedsPolling() const { return remote_; }
  // Whether everything has been sent, and whether nothing is partly received.
  bool Idle() const { return queued_.empty() && sends_.empty(); }
  bool NothingArriving() const { return receives_.empty() && aborts_.empty(); }

 private:
  bool IsLocal(int peer) const { return local_of_[static_cast<size_t>(peer)] >= 0; }
  Status PollAll(std::vector<Received>* received);
  bool TryPost(int peer, const MailboxPiece& piece);

  const ddl_transport& transport_;
  GroupMemory& memory_;
  std::vector<int> local_of_;  // local rank of each rank, -1 outside the group
  bool remote_ = false;
  std::map<int, std::deque<MailboxPiece>> queued_;  // local peers whose mailbox was full
  std::vector<std::string> arriving_;               // by local rank of the sender: the beginning of a message
  OwnedMessages sends_;
  OwnedMessages receives_;
  OwnedMessages aborts_;  // received; separate, because nothing may delay them
  Status send_error_;
  MessageCount sent_;
  MessageCount received_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_CHANNEL_H_
