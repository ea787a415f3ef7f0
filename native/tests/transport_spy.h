// Spy: sits between an engine and its transport, records the memory ranges of messages and the messages in
// progress, and can make messages fail or stay in progress.
#ifndef KERAS_DDL_TESTS_TRANSPORT_SPY_H_
#define KERAS_DDL_TESTS_TRANSPORT_SPY_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ddl.h"
#include "thread_group.h"

namespace ddl_test {

inline bool CarriesData(int tag) { return tag == 104 || tag >= 200; }

struct Spy {
  struct Message {
    int tag;
    int peer;
    bool receives;
  };

  ddl_transport inner;
  int sends_until_failure = -1;                   // data messages; negative: never
  std::function<bool(const Message&)> withholds;  // whether this message does not finish yet
  std::atomic<int> withheld{0};                   // number of Test calls that were answered "not finished"
  std::atomic<size_t>* under_way_at_end = nullptr;
  std::mutex mutex;
  std::vector<std::pair<const char*, size_t>> lent;
  std::map<void*, Message> under_way;  // by operation

  size_t DataUnderWay() {
    const std::lock_guard<std::mutex> lock(mutex);
    size_t n = 0;
    for (const auto& [operation, message] : under_way) n += CarriesData(message.tag) ? 1 : 0;
    return n;
  }
  bool Lent(const void* data, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    const char* const begin = static_cast<const char*>(data);
    for (const auto& [at, length] : lent) {
      if (at < begin + bytes && begin < at + length) return true;
    }
    return false;
  }

  int Started(int code, const Message& message, const void* buffer, size_t bytes, void* operation) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (code != DDL_OK) return code;
    if (CarriesData(message.tag)) lent.emplace_back(static_cast<const char*>(buffer), bytes);
    under_way[operation] = message;
    return code;
  }
  void Ended(void* operation) {
    const std::lock_guard<std::mutex> lock(mutex);
    under_way.erase(operation);
  }
  bool Withholds(void* operation) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto message = under_way.find(operation);
    if (!withholds || message == under_way.end() || !withholds(message->second)) return false;
    ++withheld;
    return true;
  }

  static Spy& Of(void* self) { return *static_cast<Spy*>(self); }

  void Install(ddl_transport& transport) {
    inner = transport;
    transport.self = this;
    transport.all_gather = [](void* s, const void* in, void* out, size_t bytes) {
      return Of(s).inner.all_gather(Of(s).inner.self, in, out, bytes);
    };
    transport.isend = [](void* s, int peer, int tag, const void* buffer, size_t bytes, void** operation) {
      Spy& spy = Of(s);
      if (CarriesData(tag) && spy.sends_until_failure >= 0 && spy.sends_until_failure-- == 0) {
        return static_cast<int>(DDL_INTERNAL);
      }
      const int code = spy.inner.isend(spy.inner.self, peer, tag, buffer, bytes, operation);
      return spy.Started(code, {tag, peer, false}, buffer, bytes, *operation);
    };
    transport.irecv = [](void* s, int peer, int tag, void* buffer, size_t bytes, void** operation) {
      Spy& spy = Of(s);
      const int code = spy.inner.irecv(spy.inner.self, peer, tag, buffer, bytes, operation);
      return spy.Started(code, {tag, peer, true}, buffer, bytes, *operation);
    };
    transport.test = [](void* s, void** operation, int* finished) {
      Spy& spy = Of(s);
      void* const tested = *operation;
      *finished = 0;
      if (spy.Withholds(tested)) return static_cast<int>(DDL_OK);
      const int code = spy.inner.test(spy.inner.self, operation, finished);
      if (*finished != 0) spy.Ended(tested);
      return code;
    };
    transport.cancel = [](void* s, void** operation) {
      Spy& spy = Of(s);
      void* const cancelled = *operation;
      const int code = spy.inner.cancel(spy.inner.self, operation);
      if (code == DDL_OK) spy.Ended(cancelled);
      return code;
    };
    transport.probe = [](void* s, int tag, int* peer, size_t* bytes) {
      return Of(s).inner.probe(Of(s).inner.self, tag, peer, bytes);
    };
    transport.last_error = [](void* s) { return Of(s).inner.last_error(Of(s).inner.self); };
    transport.share = [](void* s, int leader, size_t bytes) {
      return Of(s).inner.share(Of(s).inner.self, leader, bytes);
    };
    transport.destroy = [](void* s) {
      Spy& spy = Of(s);
      if (spy.under_way_at_end != nullptr) *spy.under_way_at_end += spy.under_way.size();
      spy.inner.destroy(spy.inner.self);
    };
  }
};

inline std::vector<std::unique_ptr<Spy>> Spies(size_t n) {
  std::vector<std::unique_ptr<Spy>> spies;
  for (size_t i = 0; i < n; ++i) spies.push_back(std::make_unique<Spy>());
  return spies;
}

inline RunOptions Spied(std::vector<std::unique_ptr<Spy>>& spies) {
  RunOptions options;
  options.tweak = [&spies](ddl_transport& t) { spies[static_cast<size_t>(t.rank)]->Install(t); };
  return options;
}

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_TRANSPORT_SPY_H_
