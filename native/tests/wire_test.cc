// What the transport is given: never memory of a caller, and nothing that outlives a failure.
#include "wire.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "thread_group.h"

namespace ddl_test {
namespace {

bool CarriesData(int tag) { return tag == 104 || tag >= 200; }

// Stands between an engine and its transport: knows every range that messages used, and what is under way.
struct Spy {
  ddl_transport inner;
  int sends_until_failure = -1;  // of data; negative: never
  std::mutex mutex;
  std::vector<std::pair<const char*, size_t>> lent;
  std::map<void*, int> under_way;  // operation -> tag

  size_t DataUnderWay() {
    const std::lock_guard<std::mutex> lock(mutex);
    size_t n = 0;
    for (const auto& [operation, tag] : under_way) n += CarriesData(tag) ? 1 : 0;
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

  int Started(int code, int tag, const void* buffer, size_t bytes, void* operation) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (code != DDL_OK) return code;
    if (CarriesData(tag)) lent.emplace_back(static_cast<const char*>(buffer), bytes);
    under_way[operation] = tag;
    return code;
  }
  void Ended(void* operation) {
    const std::lock_guard<std::mutex> lock(mutex);
    under_way.erase(operation);
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
      return spy.Started(code, tag, buffer, bytes, *operation);
    };
    transport.irecv = [](void* s, int peer, int tag, void* buffer, size_t bytes, void** operation) {
      Spy& spy = Of(s);
      const int code = spy.inner.irecv(spy.inner.self, peer, tag, buffer, bytes, operation);
      return spy.Started(code, tag, buffer, bytes, *operation);
    };
    transport.test = [](void* s, void** operation, int* finished) {
      Spy& spy = Of(s);
      void* const tested = *operation;
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
    transport.destroy = [](void* s) { Of(s).inner.destroy(Of(s).inner.self); };
  }
};

std::vector<std::unique_ptr<Spy>> Spies(size_t n) {
  std::vector<std::unique_ptr<Spy>> spies;
  for (size_t i = 0; i < n; ++i) spies.push_back(std::make_unique<Spy>());
  return spies;
}

RunOptions Spied(std::vector<std::unique_ptr<Spy>>& spies) {
  RunOptions options;
  options.tweak = [&spies](ddl_transport& t) { spies[static_cast<size_t>(t.rank)]->Install(t); };
  return options;
}

TEST(WireTest, NoMemoryOfACallerIsGivenToTheTransport) {
  for (const std::vector<int>& group : {AllApart(3), std::vector<int>{0, 0, 2, 2}, std::vector<int>{0, 0, 2}}) {
    auto spies = Spies(group.size());
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          Spy& spy = *spies[static_cast<size_t>(rank)];
          const size_t count = 12 * 100'000;
          std::vector<float> in(count, 1), out(count);
          ASSERT_EQ(Call(DDL_ALL_REDUCE, "a").Buffer(in.data(), out.data(), count).Run(comm).code, DDL_OK);
          ASSERT_EQ(Call(DDL_BROADCAST, "b").Root(1).Buffer(in.data(), out.data(), count).Run(comm).code, DDL_OK);
          ASSERT_EQ(Call(DDL_REDUCE_SCATTER, "r").Rows(count, 1).Buffer(in.data(), out.data(), count).Run(comm).code,
                    DDL_OK);
          Call call(DDL_ALL_GATHER, "g");
          ddl_work* const work = call.Rows(count, 1).Buffer(in.data(), nullptr, count).Start(comm);
          ASSERT_EQ(ddl_work_wait(work, 60'000), 1);
          EXPECT_FALSE(spy.Lent(ddl_work_data(work), count * group.size() * sizeof(float)));
          ddl_work_free(work);
          EXPECT_FALSE(spy.Lent(in.data(), count * sizeof(float)));
          EXPECT_FALSE(spy.Lent(out.data(), count * sizeof(float)));
          EXPECT_TRUE(rank != 0 || !spy.lent.empty());
          EXPECT_EQ(spy.DataUnderWay(), 0u);
        },
        Spied(spies));
  }
}

TEST(WireTest, AFailureTakesBackEveryMessageUnderWay) {
  for (const int sends : {0, 1, 7}) {
    auto spies = Spies(4);
    spies[2]->sends_until_failure = sends;
    RunRanks(
        {0, 0, 2, 2},
        [&](ddl_comm* comm, int rank) {
          auto data = std::make_unique<std::vector<float>>(4'000'000, 1);
          const Outcome outcome = Call(DDL_ALL_REDUCE, "a").Buffer(data->data(), data->data(), data->size()).Run(comm);
          EXPECT_EQ(outcome.code, DDL_ABORTED) << outcome.message;
          data.reset();  // the address sanitizer would see a late message
          EXPECT_EQ(spies[static_cast<size_t>(rank)]->DataUnderWay(), 0u);
        },
        Spied(spies));
  }
}

TEST(WireTest, MemoryOfAMessageThatCannotBeTakenBackStays) {
  static char* kept = nullptr;  // reachable: not a leak
  ddl_transport transport{};
  transport.irecv = [](void*, int, int, void* buffer, size_t, void** operation) {
    *operation = kept = static_cast<char*>(buffer);
    return static_cast<int>(DDL_OK);
  };
  transport.cancel = [](void*, void**) { return static_cast<int>(DDL_DEADLINE_EXCEEDED); };
  {
    ddl::WireMemory memory;
    ddl::WireMessages receives(transport, memory, ddl::WireMessages::kReceives);
    ASSERT_TRUE(receives.Start(1, 200, memory.Reserve(100), 100).ok());
  }
  kept[99] = 1;  // as a message would that comes now
  delete[] kept;
}

}  // namespace
}  // namespace ddl_test
