// HostTransport: one rank's end of the transport in ddl_host.h.
//
// Streams connect ranks of other hosts, and sockets with names in a directory connect ranks of this host. Messages are
// sent in datagrams, one message after the other to each rank. Messages are kept here until a receive asks for them.
// There is no thread: all work is done in the callers' threads.
#ifndef KERAS_DDL_CORE_HOST_TRANSPORT_H_
#define KERAS_DDL_CORE_HOST_TRANSPORT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "ddl.h"
#include "host/datagrams.h"
#include "host/streams.h"

namespace ddl {

class HostTransport {
 public:
  HostTransport(int rank, int size);
  ~HostTransport();

  Status Open(const std::string& directory, const std::string& key) { return datagrams_.Open(directory, key, rank_); }

  // `peer` is on another host: takes over the connection with it.
  Status Connect(int peer, int socket);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& error() const { return error_; }
  // See ddl_transport.
  int lost_rank() const { return lost_rank_; }
  // Keeps the text and the rank of a failure, and returns its code.
  int Fail(const Status& status);

  struct Operation;
  Status Isend(int peer, int tag, const void* buffer, size_t bytes, Operation** operation);
  Status Irecv(int peer, int tag, void* buffer, size_t bytes, Operation** operation);
  Status Test(Operation** operation, bool* finished);
  Status Cancel(Operation** operation);
  // `source` -1: any.
  Status Probe(int source, int tag, int* peer, size_t* bytes);
  Status AllGather(const void* in, void* out, size_t bytes, int timeout_ms, uint8_t* arrived);
  Status AllReduce(const void* in, void* out, uint64_t count, ddl_dtype dtype, ddl_op op);

 private:
  using Clock = std::chrono::steady_clock;
  // A message that is arriving, or has arrived and waits for a receive.
  struct Message {
    int from;
    int tag;
    size_t total;
    size_t arrived = 0;
    Operation* receive = nullptr;  // its buffer receives the message
    std::unique_ptr<char[]> kept;  // receives the message if there is no receive yet
    bool dropped = false;          // nobody receives it: its bytes are discarded
  };
  struct Peer {
    std::deque<Operation*> sends;
    Message* coming = nullptr;  // a message that has partly arrived
    bool heard = false;         // has sent something, so it had its socket open
    bool gone = false;
    Clock::time_point try_again{};  // when to try a peer again that had no socket
  };

  // Sends what the sockets accept and takes what has arrived. *more: there is more to do.
  Status Progress(bool* more = nullptr);
  Status ProgressOfStreams(int* taken);
  Status Flush(int peer);
  Status Deliver(int peer, const DatagramHeader& header, const void* bytes, size_t length, Delivery* delivery);
  Status Take(const DatagramHeader& header, const char* bytes, size_t length);
  void Begin(const DatagramHeader& header);
  void Forget(Message* message);
  void Give(Message* message, Operation* receive);
  void Finish(Operation* operation);
  void DropSends(Peer* peer);
  // Called when the stream of a peer has ended, and everything in it has been taken.
  void End(int peer);
  Status Lost(int peer) const;
  bool HasUnsent() const;
  void Wait(int timeout_ms) const;
  Status GatherOn(const void* in, void* out, size_t bytes, int timeout_ms, uint8_t* arrived);
  // Finds the ranks that operations wait for and that no longer exist.
  Status LookForGone();

  const int rank_;
  const int size_;
  Datagrams datagrams_;
  Streams streams_;
  int lost_ = -1;  // a peer whose stream has ended without a farewell
  std::string error_;
  int lost_rank_ = -1;
  std::vector<Peer> peers_;
  std::list<Message> messages_;     // messages that are kept here or go into a receive; oldest first
  std::list<Operation*> receives_;  // receives without a message, in order
  std::unordered_set<Operation*> operations_;
  std::vector<char> scratch_;
  std::vector<Operation*> gather_;  // operations of a running all_gather: a receive from, then a send to each rank
};

struct HostTransport::Operation {
  bool sends;
  int peer;
  int tag;
  const char* from;  // the buffer of a send
  char* into;        // the buffer of a receive
  size_t bytes;      // size of the buffer
  size_t sent = 0;
  bool started = false;  // the first datagram of a send was sent
  bool finished = false;
  Message* message = nullptr;  // the message that goes into this receive
  Status status;
  // The unsent rest of a send that was cancelled halfway, whose caller may have freed the buffer.
  std::unique_ptr<char[]> rest;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_HOST_TRANSPORT_H_
