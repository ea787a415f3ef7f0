// Memory passed to the transport: never a caller's, and none that outlives a failure.
#include "net/wire.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "thread_group.h"
#include "transport_spy.h"

namespace ddl_test {
namespace {

TEST(WireTest, NeverPassesACallersMemoryToTheTransport) {
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
          Call exchange(DDL_ALL_TO_ALL, "e");
          std::vector<int64_t> splits(group.size(), static_cast<int64_t>(count / group.size()));
          ddl_work* const parts = exchange.Rows(count, 1).Splits(splits).Buffer(in.data(), nullptr, count).Start(comm);
          ASSERT_EQ(ddl_work_wait(parts, 60'000), 1);
          ASSERT_EQ(ddl_work_failure(parts), nullptr);
          EXPECT_FALSE(spy.Lent(ddl_work_data(parts), count * sizeof(float)));
          ddl_work_free(parts);
          EXPECT_FALSE(spy.Lent(in.data(), count * sizeof(float)));
          EXPECT_FALSE(spy.Lent(out.data(), count * sizeof(float)));
          EXPECT_TRUE(rank != 0 || !spy.lent.empty());
          EXPECT_EQ(spy.DataUnderWay(), 0u);
        },
        Spied(spies));
  }
}

TEST(WireTest, AFailureCancelsEveryMessageInProgress) {
  for (const int sends : {0, 1, 7}) {
    auto spies = Spies(4);
    spies[2]->sends_until_failure = sends;
    RunRanks(
        {0, 0, 2, 2},
        [&](ddl_comm* comm, int rank) {
          auto data = std::make_unique<std::vector<float>>(4'000'000, 1);
          const Outcome outcome = Call(DDL_ALL_REDUCE, "a").Buffer(data->data(), data->data(), data->size()).Run(comm);
          EXPECT_EQ(outcome.code, DDL_ABORTED) << outcome.message;
          data.reset();  // the address sanitizer would report a late message
          EXPECT_EQ(spies[static_cast<size_t>(rank)]->DataUnderWay(), 0u);
        },
        Spied(spies));
  }
}

TEST(WireTest, MemoryGrowsAndIsTrimmed) {
  ddl::WireMemory memory;
  for (const size_t bytes : {100, 10, 1'000'000}) EXPECT_GE(malloc_usable_size(memory.Reserve(bytes)), bytes);
  char* const kept = memory.Reserve(10);
  memory.Trim(1'000'000);
  EXPECT_EQ(memory.Reserve(10), kept);
  memory.Trim(999'999);
  EXPECT_LT(malloc_usable_size(memory.Reserve(10)), 1000u);
}

TEST(WireTest, KeepsMemoryOfMessagesThatCannotBeCancelled) {
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
  kept[99] = 1;  // as a late message would
  delete[] kept;
}

// Whether this process may read the byte. Asks the system, because reading it could end the process.
bool IsMapped(const char* byte) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  const bool mapped = write(ends[1], byte, 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return mapped;
}

// MPI_Allreduce may return for another rank's error while its messages here are in progress.
TEST(WireTest, KeepsMemoryOfAnAllReduceThatFailedInMpi) {
  static char* kept[2];                // reachable: not a leak
  constexpr size_t kCount = 16 << 20;  // so large that the allocator returns it to the system when freed
  RunOptions options;
  options.tweak = [](ddl_transport& transport) {
    transport.plain_all_reduce = [](void*, const void* in, void* out, uint64_t, uint32_t, uint32_t) {
      kept[0] = static_cast<char*>(const_cast<void*>(in));
      kept[1] = static_cast<char*>(out);
      return static_cast<int>(DDL_INTERNAL);
    };
  };
  RunRanks(
      {0},
      [](ddl_comm* comm, int) {
        std::vector<float> data(kCount, 1);
        Call call(DDL_ALL_REDUCE, "plain");
        const Outcome outcome = call.Flags(DDL_FLAG_PLAIN_MPI).Buffer(data.data(), data.data(), data.size()).Run(comm);
        EXPECT_EQ(outcome.code, DDL_INTERNAL) << outcome.message;
      },
      options);
  for (char* const memory : kept) {
    char* const last = memory + kCount * sizeof(float) - 1;
    ASSERT_TRUE(IsMapped(last)) << "freed";
    *last = 1;  // as a late message would
  }
}

}  // namespace
}  // namespace ddl_test
