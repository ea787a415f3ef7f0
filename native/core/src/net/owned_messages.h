// OwnedMessages: small messages with their own memory, which is kept until the transport no longer uses it: until the
// message has finished or was cancelled, or else until the process ends. Nothing here waits for a peer, so a peer that
// stops in the middle of a message does not delay other peers' messages.
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
  // Starts receiving every message of `tag` that has begun to arrive.
  Status ReceiveArriving(int tag);
  // Tests all messages once and appends the finished ones, which for each peer are in the order of their start.
  Status TakeFinished(std::vector<Finished>* finished);
  // Cancels the messages in flight. Cancelling a message of a peer that does not respond blocks for a while, and there
  // may be many such peers: after `give_up`, a time of Now(), no more attempts are made.
  void Cancel(double give_up);
  // Time limit for cancelling all messages of one kind when a communicator ends.
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
