// OwnedMessages: small messages, each with memory of its own, which stays until the transport is done with it: when a
// message has finished or could be cancelled, or, failing both, until the process ends. Nothing here waits for a peer,
// so one that stops in the middle of a message holds up nobody else's.
#ifndef KERAS_DDL_CORE_NET_OWNED_MESSAGES_H_
#define KERAS_DDL_CORE_NET_OWNED_MESSAGES_H_

#include <list>
#include <string>
#include <vector>

#include "base/status.h"
#include "ddl.h"
#include "net/wire.h"

namespace ddl {

class OwnedMessages {
 public:
  struct Finished {
    int peer;
    std::string bytes;
  };

  // `transport` must outlive this, and must not be destroyed before Cancel.
  explicit OwnedMessages(const ddl_transport& transport) : transport_(transport) {}
  ~OwnedMessages() { Leak(); }
  OwnedMessages(const OwnedMessages&) = delete;
  OwnedMessages& operator=(const OwnedMessages&) = delete;

  Status Send(int peer, int tag, const std::string& bytes);
  // Starts to receive every message of `tag` that has begun to arrive.
  Status ReceiveArriving(int tag);
  // Looks at all messages once and appends those that have finished, a peer's in the order in which they were started.
  Status TakeFinished(std::vector<Finished>* finished);
  // Ends what is under way. Cancelling a message of a peer that stands still is waited for, and there may be many
  // such peers: from `give_up`, a time of Now(), on nothing more is tried.
  void Cancel(double give_up);
  // For all that a communicator's end cancels of one kind.
  static constexpr double kCancelSeconds = 0.3;

  bool empty() const { return under_way_.empty(); }

 private:
  struct Message {
    int peer = 0;
    bool receives = false;
    uint64_t bytes = 0;
    WireMemory memory;
    void* operation = nullptr;
  };

  Status Started(int code, const char* doing);
  void Leak();

  const ddl_transport& transport_;
  std::list<Message> under_way_;  // a list: neither copied nor moved
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_NET_OWNED_MESSAGES_H_
