#include "net/owned_messages.h"

#include <cstring>
#include <iterator>
#include <set>

#include "base/waiter.h"
#include "net/transport_failure.h"

namespace ddl {

Status OwnedMessages::Send(int peer, int tag, const std::string& bytes) {
  Message& message = under_way_.emplace_back();
  message.peer = peer;
  message.bytes = bytes.size();
  char* const data = message.memory.Reserve(bytes.size() + 1);  // an empty message has an address too
  std::memcpy(data, bytes.data(), bytes.size());
  return Started(transport_.isend(transport_.self, peer, tag, data, bytes.size(), &message.operation), "sending to");
}

Status OwnedMessages::ReceiveArriving(int tag) {
  for (;;) {
    int peer = -1;
    size_t bytes = 0;
    if (transport_.probe(transport_.self, tag, &peer, &bytes) != DDL_OK) {
      return TransportFailure(transport_, "looking for messages");
    }
    if (peer < 0) return {};
    Message& message = under_way_.emplace_back();
    message.peer = peer;
    message.receives = true;
    message.bytes = bytes;
    char* const data = message.memory.Reserve(bytes + 1);
    DDL_RETURN_IF_ERROR(
        Started(transport_.irecv(transport_.self, peer, tag, data, bytes, &message.operation), "receiving from"));
  }
}

Status OwnedMessages::Started(int code, const char* doing) {
  if (code == DDL_OK) return {};
  const int peer = under_way_.back().peer;
  // A part of it may be under way all the same.
  under_way_.back().memory.Leak();
  under_way_.pop_back();
  return TransportFailure(transport_, doing, peer);
}

Status OwnedMessages::TakeFinished(std::vector<Finished>* finished) {
  std::set<int> unfinished;
  for (auto at = under_way_.begin(); at != under_way_.end();) {
    Message& message = *at;
    int done = 0;
    if (unfinished.count(message.peer) == 0 && transport_.test(transport_.self, &message.operation, &done) != DDL_OK) {
      return TransportFailure(transport_, "talking to", message.peer);
    }
    if (done == 0) {
      unfinished.insert(message.peer);
      ++at;
      continue;
    }
    if (message.receives) finished->push_back({message.peer, std::string(message.memory.Reserve(0), message.bytes)});
    at = under_way_.erase(at);
  }
  return {};
}

void OwnedMessages::Cancel(double give_up) {
  std::set<int> stuck;
  for (auto at = under_way_.begin(); at != under_way_.end();) {
    const bool tried = stuck.count(at->peer) == 0 && Now() < give_up;
    if (tried && transport_.cancel(transport_.self, &at->operation) == DDL_OK) {
      at = under_way_.erase(at);
    } else {
      stuck.insert(at->peer);
      ++at;
    }
  }
  Leak();
}

void OwnedMessages::Leak() {
  for (Message& message : under_way_) message.memory.Leak();
  under_way_.clear();
}

}  // namespace ddl
