#include "host/streams.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace ddl {
namespace {

constexpr size_t kStreamBufferBytes = 4 * (kDatagramBytes + sizeof(DatagramHeader));
constexpr int kEvents = 32;

bool WouldBlock(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == ENOMEM; }

}  // namespace

Streams::~Streams() {
  for (auto& [peer, stream] : streams_) {
    const DatagramHeader farewell = {kFarewell, own_rank_, 0, 0, 0, 0};
    if (!stream.ended) (void)Send(peer, farewell, nullptr, 0);
    shutdown(stream.socket, SHUT_WR);
    close(stream.socket);
  }
  if (epoll_ >= 0) close(epoll_);
}

Status Streams::Add(int own_rank, int peer, int socket) {
  own_rank_ = own_rank;
  Stream& stream = streams_[peer];
  stream.socket = socket;
  stream.in.resize(kStreamBufferBytes);
  if (epoll_ < 0) epoll_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = peer;
  const int flags = fcntl(socket, F_GETFL);
  if (epoll_ < 0 || flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) != 0 ||
      epoll_ctl(epoll_, EPOLL_CTL_ADD, socket, &event) != 0) {
    return {DDL_INTERNAL, "the connection with rank " + std::to_string(peer) + ": " + std::strerror(errno)};
  }
  return {};
}

Delivery Streams::Send(int peer, const DatagramHeader& header, const void* bytes, size_t length) {
  Stream& stream = streams_.at(peer);
  FlushOne(&stream);
  if (stream.deaf) return Delivery::kAbsent;
  if (!stream.out.empty()) return Delivery::kFull;
  DatagramHeader sent = header;
  sent.length = static_cast<uint32_t>(length);
  iovec parts[2] = {{&sent, sizeof sent}, {const_cast<void*>(bytes), length}};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = length > 0 ? 2 : 1;
  ssize_t taken = 0;
  do {
    taken = sendmsg(stream.socket, &message, MSG_NOSIGNAL);
  } while (taken < 0 && errno == EINTR);
  if (taken < 0) {
    if (WouldBlock(errno)) return Delivery::kFull;
    stream.deaf = true;
    return Delivery::kAbsent;
  }
  for (const iovec& part : parts) {
    const auto skipped = std::min(static_cast<size_t>(taken), part.iov_len);
    taken -= static_cast<ssize_t>(skipped);
    const char* const begin = static_cast<const char*>(part.iov_base);
    if (skipped < part.iov_len) stream.out.insert(stream.out.end(), begin + skipped, begin + part.iov_len);
  }
  if (!stream.out.empty()) ++waiting_;
  return Delivery::kSent;
}

void Streams::FlushOne(Stream* stream) {
  while (!stream->out.empty() && !stream->deaf) {
    const ssize_t taken = send(stream->socket, stream->out.data() + stream->out_begin,
                               stream->out.size() - stream->out_begin, MSG_NOSIGNAL);
    if (taken < 0 && errno == EINTR) continue;
    if (taken < 0 && WouldBlock(errno)) return;
    if (taken < 0) stream->deaf = true;
    if (taken > 0) stream->out_begin += static_cast<size_t>(taken);
    if (!stream->deaf && stream->out_begin < stream->out.size()) continue;
    stream->out.clear();
    stream->out_begin = 0;
    --waiting_;
  }
}

void Streams::Flush() {
  for (auto at = streams_.begin(); waiting_ > 0 && at != streams_.end(); ++at) FlushOne(&at->second);
}

bool Streams::Read(Stream* stream) {
  if (stream->begin > 0) {
    std::memmove(stream->in.data(), stream->in.data() + stream->begin, stream->end - stream->begin);
    stream->end -= stream->begin;
    stream->begin = 0;
  }
  ssize_t read = 0;
  do {
    read = recv(stream->socket, stream->in.data() + stream->end, stream->in.size() - stream->end, 0);
  } while (read < 0 && errno == EINTR);
  if (read > 0) stream->end += static_cast<size_t>(read);
  if (read > 0 || (read < 0 && WouldBlock(errno))) return true;
  stream->error = read < 0 ? errno : 0;
  return false;
}

bool Streams::Take(int peer, Stream* stream, DatagramHeader* header, const char** bytes) {
  const size_t there = stream->end - stream->begin;
  if (there < sizeof *header) return false;
  const char* const start = stream->in.data() + stream->begin;
  std::memcpy(header, start, sizeof *header);
  if (header->length > kDatagramBytes || header->from != peer) {  // not a datagram of a rank: the stream is lost
    stream->begin = stream->end;
    shutdown(stream->socket, SHUT_RDWR);
    return false;
  }
  if (there < sizeof *header + header->length) return false;
  *bytes = start + sizeof *header;
  stream->begin += sizeof *header + header->length;
  return true;
}

void Streams::Receive(DatagramHeader* header, const char** bytes, int* ended) {
  *bytes = nullptr;
  *ended = -1;
  for (bool has_looked = false;;) {
    while (current_ >= 0) {
      Stream& stream = streams_.at(current_);
      if (!Take(current_, &stream, header, bytes)) {
        current_ = -1;
      } else if (header->kind == kFarewell) {
        stream.farewell = true;
      } else {
        return;
      }
      *bytes = nullptr;
    }
    if (ready_.empty()) {
      if (has_looked || epoll_ < 0) return;
      has_looked = true;
      epoll_event events[kEvents];
      const int count = epoll_wait(epoll_, events, kEvents, 0);
      for (int i = count; i-- > 0;) ready_.push_back(events[i].data.fd);
      if (ready_.empty()) return;
    }
    current_ = ready_.back();
    ready_.pop_back();
    Stream& stream = streams_.at(current_);
    if (!Read(&stream)) {
      epoll_ctl(epoll_, EPOLL_CTL_DEL, stream.socket, nullptr);
      stream.ended = stream.deaf = true;
      if (!stream.out.empty()) --waiting_;
      stream.out.clear();
      *ended = current_;
      current_ = -1;
      return;
    }
  }
}

}  // namespace ddl
