#include "host/datagrams.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace ddl {
namespace {

// More than the default, so that several datagrams are under way; the kernel grants what it allows.
constexpr int kBufferBytes = 4 << 20;

// A path through the open directory: sun_path has room for 107 bytes, and TMPDIR may be longer.
sockaddr_un AddressOf(int directory, const std::string& name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%s", directory, name.c_str());
  return address;
}

}  // namespace

Datagrams::~Datagrams() {
  if (socket_ >= 0) {
    unlinkat(directory_, NameOf(rank_).c_str(), 0);
    close(socket_);
  }
  if (directory_ >= 0) close(directory_);
}

Status Datagrams::Open(const std::string& directory, const std::string& key, int rank) {
  key_ = key;
  rank_ = rank;
  if (key.empty() || key.size() > 64 || key.find('/') != std::string::npos) {
    return {DDL_INVALID_ARGUMENT,
            "the key of a transport must be 1 to 64 bytes of a file name. Received: '" + key + "'"};
  }
  directory_ = open(directory.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat status = {};
  if (directory_ < 0 || fstat(directory_, &status) != 0) {
    return {DDL_INTERNAL,
            "the directory of the ranks' sockets must exist. Received: " + directory + ": " + std::strerror(errno)};
  }
  if (status.st_uid != geteuid() || (status.st_mode & 077) != 0) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", static_cast<unsigned>(status.st_mode & 07777));
    return {DDL_FAILED_PRECONDITION,
            "the directory of the ranks' sockets must belong to their user, with mode 0700. "
            "Received: " +
                directory + " of user " + std::to_string(status.st_uid) + ", mode " + mode};
  }
  const int opened = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (opened < 0) return {DDL_INTERNAL, std::string("socket: ") + std::strerror(errno)};
  setsockopt(opened, SOL_SOCKET, SO_SNDBUF, &kBufferBytes, sizeof kBufferBytes);
  const sockaddr_un address = AddressOf(directory_, NameOf(rank));
  if (bind(opened, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const int problem = errno;
    close(opened);
    const char* const remedy =
        problem == EADDRINUSE ? "Two processes may be the same rank." : "Set TMPDIR to a directory on a local disk.";
    return {DDL_INTERNAL, "rank " + std::to_string(rank) + " could not open its socket " + directory + "/" +
                              NameOf(rank) + ": " + std::strerror(problem) + ". " + remedy};
  }
  socket_ = opened;
  return {};
}

Status Datagrams::Send(int peer, const DatagramHeader& header, const void* bytes, size_t length, Delivery* delivery) {
  sockaddr_un address = AddressOf(directory_, NameOf(peer));
  iovec parts[2] = {{const_cast<DatagramHeader*>(&header), sizeof header}, {const_cast<void*>(bytes), length}};
  msghdr message = {};
  message.msg_name = &address;
  message.msg_namelen = sizeof address;
  message.msg_iov = parts;
  message.msg_iovlen = length > 0 ? 2 : 1;
  ssize_t sent = 0;
  do {
    sent = sendmsg(socket_, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) {
    *delivery = Delivery::kSent;
  } else if (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM) {
    *delivery = Delivery::kFull;
  } else if (errno == ECONNREFUSED || errno == ENOENT || errno == ECONNRESET || errno == EPIPE) {
    *delivery = Delivery::kAbsent;
  } else {
    return {DDL_INTERNAL, "rank " + std::to_string(rank_) + ": sendmsg, peer " + std::to_string(peer) + ", " +
                              std::to_string(length) + " bytes: " + std::strerror(errno)};
  }
  return {};
}

Status Datagrams::Receive(DatagramHeader* header, void* bytes, ptrdiff_t* length) {
  iovec parts[2] = {{header, sizeof *header}, {bytes, kDatagramBytes}};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  *length = -1;
  ssize_t received = 0;
  do {
    received = recvmsg(socket_, &message, 0);
  } while (received < 0 && errno == EINTR);
  if (received >= static_cast<ssize_t>(sizeof *header)) {
    *length = received - static_cast<ssize_t>(sizeof *header);
  } else if (received < 0 && errno != EAGAIN) {
    return {DDL_INTERNAL, "rank " + std::to_string(rank_) + ": recvmsg: " + std::strerror(errno)};
  }
  return {};
}

void Datagrams::Wait(int timeout_ms, int other) const {
  pollfd waited[] = {{socket_, POLLIN, 0}, {other, POLLIN, 0}};  // poll ignores -1
  poll(waited, 2, timeout_ms);
}

}  // namespace ddl
