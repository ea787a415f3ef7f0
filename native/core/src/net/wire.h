// Wire: the memory that is lent to the transport, and the messages in flight in it.
//
// When a communicator breaks during a collective, messages may still be in flight, and the transport may be unable to
// cancel them (a peer that is dead or stopped). A caller's buffer is therefore never given to the transport: messages
// are sent from and received into WireMemory, which outlives them, if necessary until the process ends.
#ifndef KERAS_DDL_CORE_NET_WIRE_H_
#define KERAS_DDL_CORE_NET_WIRE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

// Bytes of one message of an all-reduce in blocks (hierarchy/all_reduce.cc). Large enough that its overhead is
// negligible; short enough that MPI sends it eagerly (Open MPI over TCP up to 64 KiB with its header). A longer one
// uses the rendezvous protocol, whose reply queues behind other data. A few of these in flight per rank also fit into
// the queue of a switch, which drops anything beyond it. Nothing throttles the sender of eager messages, so only use
// this for algorithms that keep few messages in flight.
constexpr uint64_t kWireMessageBytes = uint64_t{60} * 1024;

// Uninitialised memory that grows on demand. Freed with the object, unless a message could not be cancelled.
class WireMemory {
 public:
  WireMemory() = default;
  ~WireMemory() {
    if (leaked_) static_cast<void>(data_.release());
  }
  WireMemory(const WireMemory&) = delete;
  WireMemory& operator=(const WireMemory&) = delete;

  // At least `bytes`. REQUIRES: no message is under way in it. Contents are lost when it grows.
  char* Reserve(uint64_t bytes);
  // Frees the memory if it is larger than that. REQUIRES: no message is under way in it.
  void Trim(uint64_t bytes);
  // A message in flight could not be cancelled: never free the memory.
  void Leak() { leaked_ = true; }

 private:
  std::unique_ptr<char[]> data_;
  uint64_t bytes_ = 0;
  bool leaked_ = false;
};

// Messages in one direction, in the order in which they were started. Those still in flight at destruction are
// cancelled.
class WireMessages {
 public:
  enum Direction { kSends, kReceives };
  // All messages lie in `memory`, which outlives this.
  WireMessages(const ddl_transport& transport, WireMemory& memory, Direction direction)
      : transport_(transport), memory_(memory), direction_(direction) {}
  ~WireMessages() { Cancel(); }
  WireMessages(const WireMessages&) = delete;
  WireMessages& operator=(const WireMessages&) = delete;

  Status Start(int peer, int tag, char* data, uint64_t bytes);
  // Tests the oldest message once. *finished: it has finished and has been removed. REQUIRES: size() > 0.
  Status TakeFinished(bool* finished);
  void Cancel();

  size_t size() const { return under_way_.size(); }
  // The oldest message, for people: "a message from rank 3".
  std::string Describe() const;

 private:
  struct Message {
    void* operation;
    int peer;
  };
  const ddl_transport& transport_;
  WireMemory& memory_;
  const Direction direction_;
  std::deque<Message> under_way_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_NET_WIRE_H_
