#include "host/transport.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

namespace ddl {
namespace {

constexpr auto kAbsentPause = std::chrono::milliseconds(100);
constexpr auto kDrain = std::chrono::milliseconds(200);
// The largest number of datagrams to receive before sending again.
constexpr int kTakenAtOnce = 64;

std::string Text(const char* what, int peer, size_t bytes) {
  return std::string(what) + ", peer " + std::to_string(peer) + ", " + std::to_string(bytes) + " bytes";
}

}  // namespace

HostTransport::HostTransport(int rank, int size)
    : rank_(rank), size_(size), peers_(static_cast<size_t>(size)), scratch_(kDatagramBytes) {}

HostTransport::~HostTransport() {
  // Their memory may not be there any more.
  for (Operation*& operation : gather_) {
    if (operation != nullptr && !Cancel(&operation).ok()) return;
  }
  receives_.clear();
  for (Message& message : messages_) {
    message.receive = nullptr;
    message.dropped = true;
  }
  // A farewell must still be handed over, and nobody has waited for it.
  const auto end = Clock::now() + kDrain;
  while (HasUnsent() && Clock::now() < end && Progress().ok()) {
    if (HasUnsent()) Wait(1);
  }
  for (Operation* operation : operations_) delete operation;
}

Status HostTransport::Connect(int peer, int socket) {
  if (peer < 0 || peer >= size_ || peer == rank_ || streams_.Has(peer)) {
    return {DDL_INVALID_ARGUMENT, "no such peer to connect: " + std::to_string(peer)};
  }
  peers_[static_cast<size_t>(peer)].heard = true;
  return streams_.Add(rank_, peer, socket);
}

int HostTransport::Fail(const Status& status) {
  if (!status.ok()) {
    error_ = "rank " + std::to_string(rank_) + ": " + status.message();
    lost_rank_ = status.ranks().empty() ? -1 : status.ranks().front().rank;
  }
  return status.code();
}

Status HostTransport::Isend(int peer, int tag, const void* buffer, size_t bytes, Operation** operation) {
  if (peer < 0 || peer >= size_ || peer == rank_) return {DDL_INTERNAL, Text("isend: no such peer", peer, bytes)};
  Operation* const send = new (std::nothrow) Operation;
  if (send == nullptr) return {DDL_INTERNAL, Text("isend: out of memory", peer, bytes)};
  send->sends = true;
  send->peer = peer;
  send->tag = tag;
  send->from = static_cast<const char*>(buffer);
  send->bytes = bytes;
  operations_.insert(send);
  *operation = send;
  Peer& to = peers_[static_cast<size_t>(peer)];
  to.sends.push_back(send);
  if (to.gone) DropSends(&to);
  return to.sends.size() == 1 ? Flush(peer) : Status{};
}

Status HostTransport::Irecv(int peer, int tag, void* buffer, size_t bytes, Operation** operation) {
  if (peer < 0 || peer >= size_ || peer == rank_) return {DDL_INTERNAL, Text("irecv: no such peer", peer, bytes)};
  Operation* const receive = new (std::nothrow) Operation;
  if (receive == nullptr) return {DDL_INTERNAL, Text("irecv: out of memory", peer, bytes)};
  receive->sends = false;
  receive->peer = peer;
  receive->tag = tag;
  receive->into = static_cast<char*>(buffer);
  receive->bytes = bytes;
  operations_.insert(receive);
  *operation = receive;
  for (Message& message : messages_) {
    if (message.from == peer && message.tag == tag && message.receive == nullptr && !message.dropped) {
      Give(&message, receive);
      return {};
    }
  }
  receives_.push_back(receive);
  if (peers_[static_cast<size_t>(peer)].gone && streams_.Has(peer)) End(peer);
  return {};
}

// Lets `message`, of which a part or all has come, go into `receive`.
void HostTransport::Give(Message* message, Operation* receive) {
  message->receive = receive;
  receive->message = message;
  if (message->total > receive->bytes) {
    receive->status = {DDL_INTERNAL, Text("irecv", message->from, message->total) + ": the buffer has " +
                                         std::to_string(receive->bytes)};
    message->dropped = true;
    message->kept.reset();
  } else if (message->kept != nullptr) {
    std::memcpy(receive->into, message->kept.get(), message->arrived);
    message->kept.reset();
  }
  if (message->dropped || message->arrived == message->total) {
    receive->finished = true;
    receive->message = nullptr;
    message->receive = nullptr;
    message->dropped = true;
    if (message->arrived == message->total) Forget(message);
  }
}

void HostTransport::Forget(Message* message) {
  Peer& from = peers_[static_cast<size_t>(message->from)];
  if (from.coming == message) from.coming = nullptr;
  messages_.remove_if([message](const Message& each) { return &each == message; });
}

Status HostTransport::Test(Operation** operation, bool* finished) {
  *finished = true;
  if (*operation == nullptr) return {};
  if (!(*operation)->finished) DDL_RETURN_IF_ERROR(Progress());
  *finished = (*operation)->finished;
  if (!*finished) return {};
  const std::unique_ptr<Operation> ended(*operation);
  operations_.erase(ended.get());
  *operation = nullptr;
  return ended->status;
}

Status HostTransport::Cancel(Operation** operation) {
  Operation* const cancelled = *operation;
  if (!cancelled->finished && cancelled->sends) {
    auto& sends = peers_[static_cast<size_t>(cancelled->peer)].sends;
    if (cancelled->started) {
      // The rest must follow, or the receiver would take the next message for it.
      const size_t left = cancelled->bytes - cancelled->sent;
      cancelled->rest.reset(new (std::nothrow) char[std::max<size_t>(left, 1)]);
      if (cancelled->rest == nullptr) return {DDL_DEADLINE_EXCEEDED, Text("cancel: no memory", cancelled->peer, left)};
      std::memcpy(cancelled->rest.get(), cancelled->from + cancelled->sent, left);
      cancelled->from = cancelled->rest.get() - cancelled->sent;
      *operation = nullptr;
      return {};
    }
    sends.erase(std::find(sends.begin(), sends.end(), cancelled));
  } else if (!cancelled->finished) {
    receives_.remove(cancelled);
    if (cancelled->message != nullptr) {
      cancelled->message->receive = nullptr;
      cancelled->message->dropped = true;
    }
  }
  operations_.erase(cancelled);
  delete cancelled;
  *operation = nullptr;
  return {};
}

Status HostTransport::Probe(int source, int tag, int* peer, size_t* bytes) {
  *peer = -1;
  *bytes = 0;
  DDL_RETURN_IF_ERROR(Progress());
  for (const Message& message : messages_) {
    if (message.tag != tag || message.receive != nullptr || message.dropped) continue;
    if (source >= 0 && message.from != source) continue;
    *peer = message.from;
    *bytes = message.total;
    return {};
  }
  return lost_ >= 0 ? Lost(lost_) : Status{};
}

Status HostTransport::Progress(bool* more) {
  int taken = 0;
  const bool has_local_peers = streams_.size() + 1 < peers_.size();
  for (; taken < kTakenAtOnce && has_local_peers; ++taken) {
    DatagramHeader header = {};
    ptrdiff_t length = -1;
    DDL_RETURN_IF_ERROR(datagrams_.Receive(&header, scratch_.data(), &length));
    if (length < 0) break;
    DDL_RETURN_IF_ERROR(Take(header, scratch_.data(), static_cast<size_t>(length)));
  }
  if (!streams_.empty()) DDL_RETURN_IF_ERROR(ProgressOfStreams(&taken));
  if (more != nullptr) *more = taken >= kTakenAtOnce;
  for (int peer = 0; peer < size_; ++peer) {
    if (!peers_[static_cast<size_t>(peer)].sends.empty()) DDL_RETURN_IF_ERROR(Flush(peer));
  }
  return {};
}

Status HostTransport::ProgressOfStreams(int* taken) {
  streams_.Flush();
  for (; *taken < kTakenAtOnce; ++*taken) {
    DatagramHeader header = {};
    const char* bytes = nullptr;
    int ended = -1;
    streams_.Receive(&header, &bytes, &ended);
    if (bytes != nullptr) {
      DDL_RETURN_IF_ERROR(Take(header, bytes, header.length));
    } else if (ended >= 0) {
      End(ended);
    } else {
      break;
    }
  }
  return {};
}

void HostTransport::End(int number) {
  Peer& peer = peers_[static_cast<size_t>(number)];
  peer.gone = true;
  DropSends(&peer);
  if (streams_.SaidFarewell(number)) return;
  lost_ = number;
  const auto waits = [number](const Operation* each) {
    return !each->sends && !each->finished && each->peer == number;
  };
  receives_.remove_if(waits);
  for (Operation* operation : operations_) {
    if (!waits(operation)) continue;
    if (operation->message != nullptr) {
      operation->message->receive = nullptr;
      operation->message->dropped = true;
      operation->message = nullptr;
    }
    operation->status = Lost(number);
    operation->finished = true;
  }
}

Status HostTransport::Lost(int peer) const {
  const int error = streams_.ErrorOf(peer);
  const bool is_silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  return {DDL_ABORTED,
          "rank " + std::to_string(peer) +
              (is_silent ? " died, or its host cannot be reached: its connection has ended (" +
                               std::string(std::strerror(error)) + ")"
                         : " died: its connection ended unexpectedly. See the end of its output"),
          {{peer, DDL_RANK_DIED}}};
}

bool HostTransport::HasUnsent() const {
  return streams_.has_unsent() ||
         std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.heard && !p.sends.empty(); });
}

void HostTransport::Wait(int timeout_ms) const {
  if (!streams_.has_more()) datagrams_.Wait(timeout_ms, streams_.descriptor());
}

Status HostTransport::Deliver(int peer, const DatagramHeader& header, const void* bytes, size_t length,
                              Delivery* delivery) {
  if (!streams_.Has(peer)) return datagrams_.Send(peer, header, bytes, length, delivery);
  *delivery = streams_.Send(peer, header, bytes, length);
  return {};
}

Status HostTransport::Flush(int number) {
  Peer& peer = peers_[static_cast<size_t>(number)];
  // A rank that is missing will announce itself, because it sends to the present ranks.
  if (!peer.heard && Clock::now() < peer.try_again) return {};
  while (!peer.sends.empty()) {
    Operation* const send = peer.sends.front();
    const size_t length = std::min(kDatagramBytes, send->bytes - send->sent);
    const DatagramHeader header = {kData, rank_, send->tag, 0, send->bytes, send->sent};
    Delivery delivery = Delivery::kFull;
    DDL_RETURN_IF_ERROR(Deliver(number, header, send->from + send->sent, length, &delivery));
    if (delivery == Delivery::kFull) break;
    if (delivery == Delivery::kAbsent) {
      if (peer.heard || send->started) {
        peer.gone = true;
        DropSends(&peer);
      }
      peer.try_again = Clock::now() + kAbsentPause;
      break;
    }
    send->started = true;
    send->sent += length;
    if (send->sent < send->bytes) continue;
    peer.sends.pop_front();
    Finish(send);
  }
  return {};
}

void HostTransport::Finish(Operation* operation) {
  operation->finished = true;
  if (operation->rest == nullptr) return;
  operations_.erase(operation);
  delete operation;
}

void HostTransport::DropSends(Peer* peer) {
  for (Operation* send : peer->sends) Finish(send);
  peer->sends.clear();
}

Status HostTransport::Take(const DatagramHeader& header, const char* bytes, size_t length) {
  if (header.from < 0 || header.from >= size_ || header.from == rank_) return {};
  Peer& peer = peers_[static_cast<size_t>(header.from)];
  peer.heard = true;
  if (header.kind != kData) return {};
  if (header.offset == 0 && peer.coming == nullptr) Begin(header);
  Message* const message = peer.coming;
  if (message == nullptr || header.offset != message->arrived || header.total - header.offset < length) {
    return {DDL_INTERNAL, Text("the pieces of a message do not fit together", header.from, length)};
  }
  if (!message->dropped && length > 0) {
    if (message->receive == nullptr && message->kept == nullptr) {
      message->kept.reset(new (std::nothrow) char[message->total]);
      if (message->kept == nullptr)
        return {DDL_INTERNAL, Text("out of memory for a message", header.from, message->total)};
    }
    char* const target = message->receive != nullptr ? message->receive->into : message->kept.get();
    std::memcpy(target + message->arrived, bytes, length);
  }
  message->arrived += length;
  if (message->arrived < message->total) return {};
  peer.coming = nullptr;
  if (message->receive != nullptr) {
    message->receive->finished = true;
    message->receive->message = nullptr;
  }
  if (message->receive != nullptr || message->dropped) Forget(message);
  return {};
}

void HostTransport::Begin(const DatagramHeader& header) {
  messages_.push_back({header.from, header.tag, header.total, 0, nullptr, nullptr, false});
  Message* const message = &messages_.back();
  peers_[static_cast<size_t>(header.from)].coming = message;
  const auto wanted = std::find_if(receives_.begin(), receives_.end(), [&](const Operation* receive) {
    return receive->peer == header.from && receive->tag == header.tag;
  });
  if (wanted == receives_.end()) return;
  Operation* const receive = *wanted;
  receives_.erase(wanted);
  if (message->total > 0) {
    Give(message, receive);
  } else {  // Take ends it
    message->receive = receive;
    receive->message = message;
  }
}

}  // namespace ddl
