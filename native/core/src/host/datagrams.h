// Datagrams: messages of limited length between the ranks of one host. Each rank has a socket with a name in a private
// directory.
#ifndef KERAS_DDL_CORE_HOST_DATAGRAMS_H_
#define KERAS_DDL_CORE_HOST_DATAGRAMS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace ddl {

enum DatagramKind : uint32_t {
  kData = 0x6b64646c,  // "kddl"
  kPing,               // is anybody there?
  kFarewell,           // of a stream: its end follows
};

// The header of each datagram. `offset` and `total`: the datagram's place in its message. `length`: only used in a
// stream.
struct DatagramHeader {
  uint32_t kind;
  int32_t from;
  int32_t tag;
  uint32_t length;
  uint64_t total;
  uint64_t offset;
};

// Bytes of a message in one datagram: a few of them fit into a socket's default buffer.
constexpr size_t kDatagramBytes = size_t{1} << 16;

enum class Delivery {
  kSent,
  kFull,   // the receiver must read first
  kAbsent  // nobody has the socket open yet, or any more
};

class Datagrams {
 public:
  Datagrams() = default;
  Datagrams(const Datagrams&) = delete;
  Datagrams& operator=(const Datagrams&) = delete;
  // Removes this rank's socket.
  ~Datagrams();

  // Opens the socket `key`.`rank` in `directory`, which must be private to this user.
  Status Open(const std::string& directory, const std::string& key, int rank);

  // Never blocks. Returns only errors that Delivery does not have.
  Status Send(int peer, const DatagramHeader& header, const void* bytes, size_t length, Delivery* delivery);
  // Takes the next datagram; *length < 0: there is none. `bytes` has room for kDatagramBytes.
  Status Receive(DatagramHeader* header, void* bytes, ptrdiff_t* length);
  // Waits until there is a datagram, `other` is readable (-1: none), or `timeout_ms` has passed.
  void Wait(int timeout_ms, int other) const;

 private:
  std::string NameOf(int rank) const { return key_ + "." + std::to_string(rank); }

  int directory_ = -1;
  int socket_ = -1;
  int rank_ = -1;
  std::string key_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_HOST_DATAGRAMS_H_
