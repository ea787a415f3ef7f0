// Streams: datagrams to ranks of other hosts, over connected stream sockets.
//
// A datagram begins with its header, whose `length` says how many bytes follow. A rank that closes its end says
// farewell first. An end without a farewell means that the rank died; the kernel of a living host reports it at once.
#ifndef KERAS_DDL_CORE_HOST_STREAMS_H_
#define KERAS_DDL_CORE_HOST_STREAMS_H_

#include <cstddef>
#include <map>
#include <vector>

#include "base/status.h"
#include "host/datagrams.h"

namespace ddl {

class Streams {
 public:
  Streams() = default;
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;
  // Says farewell to all peers, and closes.
  ~Streams();

  // Takes over the connection with `peer`, from which nothing has been read yet.
  Status Add(int own_rank, int peer, int socket);
  bool empty() const { return streams_.empty(); }
  size_t size() const { return streams_.size(); }
  bool Has(int peer) const { return streams_.count(peer) > 0; }

  // Like Datagrams::Send. kSent: bytes that the socket has not taken wait here.
  Delivery Send(int peer, const DatagramHeader& header, const void* bytes, size_t length);
  // Takes the next datagram. *bytes: valid until the next call; nullptr: there is none. *ended: a peer whose stream has
  // ended (each peer once), or -1.
  void Receive(DatagramHeader* header, const char** bytes, int* ended);
  // Whether an ended stream had a farewell; if not, the system's error with which it ended, or 0.
  bool SaidFarewell(int peer) const { return streams_.at(peer).farewell; }
  int ErrorOf(int peer) const { return streams_.at(peer).error; }
  // Sends waiting bytes.
  void Flush();
  bool has_unsent() const { return waiting_ > 0; }
  // Whether Receive may have something without waiting, although nothing arrives.
  bool has_more() const { return current_ >= 0 || !ready_.empty(); }
  // Becomes readable when a datagram arrives; -1 without streams.
  int descriptor() const { return epoll_; }

 private:
  struct Stream {
    int socket = -1;
    bool ended = false;
    bool deaf = false;  // accepts no more data
    bool farewell = false;
    int error = 0;
    std::vector<char> in;  // [begin, end) is to be handed over
    size_t begin = 0;
    size_t end = 0;
    std::vector<char> out;  // from out_begin on
    size_t out_begin = 0;
  };
  void FlushOne(Stream* stream);
  // Reads once. False: it has ended.
  bool Read(Stream* stream);
  // Whether a whole datagram was there.
  bool Take(int peer, Stream* stream, DatagramHeader* header, const char** bytes);

  int own_rank_ = -1;
  int epoll_ = -1;
  std::map<int, Stream> streams_;
  std::vector<int> ready_;  // peers from which data has come, the next one last
  int current_ = -1;        // whose datagrams are handed over
  int waiting_ = 0;         // streams with something in `out`
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_HOST_STREAMS_H_
