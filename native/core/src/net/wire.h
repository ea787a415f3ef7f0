// Wire: the memory that is lent to the transport, and the messages under way in it.
//
// When a communicator breaks in the middle of a collective, messages may still be under way, and the transport may not
// be able to cancel them (a peer that is dead or stopped). No buffer of a caller is therefore ever given to the
// transport: messages start from and land in WireMemory, which outlives them, if need be until the process ends.
#ifndef KERAS_DDL_CORE_NET_WIRE_H_
#define KERAS_DDL_CORE_NET_WIRE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

// Bytes of one message of an all-reduce in blocks (hierarchy/all_reduce.cc). Large enough that its overhead vanishes;
// short enough that MPI sends it at once (Open MPI over TCP up to 64 KiB with its header), where a longer one is
// announced first and waits for an answer that queues behind other data. A few of these under way per rank also stay
// below what the queue of a switch holds: more is dropped there and sent again. Nothing holds back the sender of a
// message that is not announced: only for algorithms in which few are under way by themselves, because each waits for
// its answer.
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
  // What is under way could not be cancelled: the memory is never freed.
  void Leak() { leaked_ = true; }

 private:
  std::unique_ptr<char[]> data_;
  uint64_t bytes_ = 0;
  bool leaked_ = false;
};

// Messages in one direction, under way in the order in which they were started. What is under way when this ends is
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
  // Looks at the oldest message once: true when it has finished, and is then forgotten. REQUIRES: size() > 0.
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
