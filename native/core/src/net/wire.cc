#include "net/wire.h"

#include <set>

#include "net/transport_failure.h"

namespace ddl {

char* WireMemory::Reserve(uint64_t bytes) {
  if (bytes_ < bytes) {
    data_.reset(new char[bytes]);
    bytes_ = bytes;
  }
  return data_.get();
}

void WireMemory::Trim(uint64_t bytes) {
  if (bytes_ <= bytes) return;
  data_.reset();
  bytes_ = 0;
}

Status WireMessages::Start(int peer, int tag, char* data, uint64_t bytes) {
  void* operation = nullptr;
  const int code = direction_ == kSends ? transport_.isend(transport_.self, peer, tag, data, bytes, &operation)
                                        : transport_.irecv(transport_.self, peer, tag, data, bytes, &operation);
  if (code != DDL_OK) {
    return TransportFailure(transport_, direction_ == kSends ? "sending to" : "receiving from", peer);
  }
  under_way_.push_back({operation, peer});
  return {};
}

Status WireMessages::TakeFinished(bool* finished) {
  Message& oldest = under_way_.front();
  int done = 0;
  const int code = transport_.test(transport_.self, &oldest.operation, &done);
  if (code != DDL_OK) return TransportFailure(transport_, "talking to", oldest.peer);
  *finished = done != 0;
  if (*finished) under_way_.pop_front();
  return {};
}

void WireMessages::Cancel() {
  // Cancelling a message of a peer that does not respond blocks for a while; do it once only, because the abort must go
  // out soon.
  std::set<int> stuck;
  for (Message& message : under_way_) {
    if (message.operation == nullptr) continue;
    if (stuck.count(message.peer) != 0) {
      memory_.Leak();
      continue;
    }
    if (transport_.cancel(transport_.self, &message.operation) != DDL_OK) {
      memory_.Leak();
      if (direction_ == kSends) stuck.insert(message.peer);
    }
  }
  under_way_.clear();
}

std::string WireMessages::Describe() const {
  if (under_way_.empty()) return "a message";
  return std::string("a message ") + (direction_ == kSends ? "to" : "from") + " rank " +
         std::to_string(under_way_.front().peer);
}

}  // namespace ddl
