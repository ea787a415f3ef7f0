// Ranks that request different collectives: every rank gets one clear error, and all can continue.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include "several_groups.h"
#include "test_data.h"
#include "thread_group.h"

namespace ddl_test {
namespace {

// ---- requests that differ -------------------------------------------------------------------------------------------

struct Mismatch {
  const char* name;
  void (*fill)(Call& call, bool odd, double* memory);  // `odd`: true on the one rank that differs
  const char* usual;                                   // the message's words for each side
  const char* odd;
};

const Mismatch kMismatches[] = {
    {"kind",
     [](Call& call, bool odd, double* memory) {
       call.Buffer(memory, memory, 4).request.kind = odd ? DDL_BROADCAST : DDL_ALL_REDUCE;
     },
     "all_reduce", "broadcast"},
    {"kind_without_data",
     [](Call& call, bool odd, double* memory) {
       if (odd) {
         call.request.kind = DDL_BARRIER;
       } else {
         call.Buffer(memory, memory, 4);
       }
     },
     "all_reduce", "barrier"},
    {"dtype",
     [](Call& call, bool odd, double* memory) {
       call.Dtype(odd ? DDL_FLOAT64 : DDL_FLOAT16).Buffer(memory, memory, 4);
     },
     "float16", "float64"},
    {"op", [](Call& call, bool odd, double* memory) { call.Op(odd ? DDL_MEAN : DDL_SUM).Buffer(memory, memory, 4); },
     "sum", "mean"},
    {"count", [](Call& call, bool odd, double* memory) { call.Buffer(memory, memory, odd ? 5 : 4); }, "4", "5"},
    {"root",
     [](Call& call, bool odd, double* memory) {
       call.Root(odd ? 1 : 0).Buffer(memory, memory, 4).request.kind = DDL_BROADCAST;
     },
     "root: ", "1"},
    {"fingerprint",
     [](Call& call, bool odd, double* memory) {
       call.Buffer(memory, memory, 4).request.fingerprint = odd ? 987654321 : 123456789;
     },
     "123456789", "987654321"},
    {"fingerprint_with_details",
     [](Call& call, bool odd, double* memory) {
       call.Detail(odd ? "[2, 2]" : "[4, 1]").Buffer(memory, memory, 4).request.fingerprint = odd ? 7 : 6;
     },
     "[4, 1]", "[2, 2]"},
    {"fingerprint_with_equal_details",
     [](Call& call, bool odd, double* memory) {
       call.Detail("12 tensors").Buffer(memory, memory, 4).request.fingerprint = odd ? 987654321 : 123456789;
     },
     "123456789", "987654321"},
    {"flags",
     [](Call& call, bool odd, double* memory) { call.Flags(odd ? DDL_FLAG_PLAIN_MPI : 0).Buffer(memory, memory, 4); },
     "neither", "mpi"},
    {"tolerance",
     [](Call& call, bool odd, double* memory) {
       call.Flags(DDL_FLAG_CHECK).Buffer(memory, memory, 4).request.tolerance = odd ? 3e-7 : 2e-7;
     },
     "2e-07", "3e-07"},
    {"rows_of_reduce_scatter",
     [](Call& call, bool odd, double* memory) {
       call.Rows(odd ? 3 : 4, odd ? 4 : 3).Buffer(memory, memory, 12).request.kind = DDL_REDUCE_SCATTER;
     },
     "rows: ", "3"},
    {"row_count_of_all_gather",
     [](Call& call, bool odd, double* memory) {
       call.Rows(2, odd ? 7 : 6).Buffer(memory, nullptr, odd ? 14 : 12).request.kind = DDL_ALL_GATHER;
     },
     "6", "7"},
    {"row_count_of_all_to_all",
     [](Call& call, bool odd, double* memory) {
       // The splits are also wrong, on all ranks; the message names the difference.
       call.Rows(2, odd ? 7 : 6).Splits(std::vector<int64_t>(8)).Buffer(memory, nullptr, odd ? 14 : 12);
       call.request.kind = DDL_ALL_TO_ALL;
     },
     "elements per row: ", "7"},
    {"all_to_all_for_all_gather",
     [](Call& call, bool odd, double* memory) {
       call.Rows(2, 6).Splits(std::vector<int64_t>(8)).Buffer(memory, nullptr, 12);
       call.request.kind = odd ? DDL_ALL_TO_ALL : DDL_ALL_GATHER;
     },
     "all_gather", "all_to_all"},
};

class MismatchTest : public testing::TestWithParam<Mismatch> {};

TEST_P(MismatchTest, FailsEverywhereWithBothValuesAndTheNextCollectiveWorks) {
  for (const std::vector<int>& group : Groups()) {
    const int size = static_cast<int>(group.size());
    for (const int odd_rank : {0, size - 1}) {
      if (kSanitized && odd_rank == 0) continue;
      std::mutex mutex;
      std::vector<std::string> messages;
      RunRanks(group, [&](ddl_comm* comm, int rank) {
        double memory[16] = {};
        Call call(DDL_ALL_REDUCE, "layer_7/kernel");
        GetParam().fill(call, rank == odd_rank, memory);
        const Outcome outcome = call.Run(comm);
        EXPECT_EQ(outcome.code, DDL_FAILED_PRECONDITION) << outcome.message;
        EXPECT_EQ(outcome.name, "layer_7/kernel");
        std::map<int, uint32_t> named;
        for (int each = 0; each < size; ++each) named[each] = DDL_RANK_NAMED;
        EXPECT_EQ(outcome.roles, named);
        EXPECT_TRUE(Contains(outcome.message, "layer_7/kernel"));
        EXPECT_TRUE(Contains(outcome.message, GetParam().usual));
        EXPECT_TRUE(Contains(outcome.message, GetParam().odd));
        EXPECT_TRUE(Contains(outcome.message, "rank(s) " + std::to_string(odd_rank)));
        const Outcome next = SumOfOne(comm, "layer_7/kernel");
        EXPECT_EQ(next.code, DDL_OK) << next.message;
        const std::lock_guard<std::mutex> lock(mutex);
        messages.push_back(outcome.message);
      });
      for (const std::string& message : messages) EXPECT_EQ(message, messages[0]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Fields, MismatchTest, testing::ValuesIn(kMismatches),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(MismatchTest, IgnoredFieldsMayDiffer) {
  RunRanks({0, 0, 2}, [](ddl_comm* comm, int rank) {
    double memory[4] = {1, 1, 1, 1};
    Call broadcast(DDL_BROADCAST, "a");
    broadcast.Op(rank == 1 ? DDL_MIN : DDL_SUM).Buffer(memory, memory, 4);
    EXPECT_EQ(broadcast.Run(comm).code, DDL_OK);
    Call sum(DDL_ALL_REDUCE, "b");
    sum.Root(rank).Flags(rank == 1 ? DDL_FLAG_BLOCKING : 0).Detail(rank == 1 ? "x" : "y").Buffer(memory, memory, 4);
    sum.request.tolerance = rank;
    EXPECT_EQ(sum.Run(comm).code, DDL_OK);
  });
}

// ---- requests that no rank could run --------------------------------------------------------------------------------

TEST(InvalidTest, IsRefusedAtOnceOnThatRankOnly) {
  RunRanks({0, 0}, [](ddl_comm* comm, int rank) {
    double memory[4] = {};
    if (rank == 0) {
      const auto refused = [&](Call& call, const std::string& part) {
        const Outcome outcome = call.Run(comm);
        EXPECT_EQ(outcome.code, DDL_INVALID_ARGUMENT) << part;
        EXPECT_TRUE(Contains(outcome.message, part));
        EXPECT_TRUE(Contains(outcome.message, "Received"));
      };
      Call unnamed(DDL_ALL_REDUCE, "");
      refused(unnamed, "name");
      Call long_name(DDL_ALL_REDUCE, std::string(1024, 'n'));
      refused(long_name, "1023");
      Call root(DDL_BROADCAST, "x");
      refused(root.Root(2).Buffer(memory, memory, 1), "root");
      Call rows(DDL_REDUCE_SCATTER, "x");
      refused(rows.Rows(2, 3).Buffer(memory, memory, 4), "rows");
      Call splits(DDL_ALL_TO_ALL, "x");
      refused(splits.Rows(4, 1).Buffer(memory, nullptr, 4), "splits");
      Call kind(DDL_ALL_REDUCE, "x");
      kind.request.kind = DDL_NUM_KINDS;
      refused(kind, "kind");
      Call dtype(DDL_ALL_REDUCE, "x");
      dtype.request.dtype = DDL_NUM_DTYPES;
      refused(dtype, "dtype");
      Call op(DDL_ALL_REDUCE, "x");
      op.request.op = DDL_NUM_OPS;
      refused(op, "op");
      Call integers(DDL_ALL_REDUCE, "x");
      refused(integers.Dtype(DDL_INT32).Op(DDL_ADASUM).Buffer(memory, memory, 1), "adasum: floating");
      Call scattered(DDL_REDUCE_SCATTER, "x");
      refused(scattered.Op(DDL_ADASUM).Rows(2, 1).Buffer(memory, memory, 2), "adasum: for all_reduce");
      Call plain(DDL_ALL_REDUCE, "x");
      refused(plain.Op(DDL_ADASUM).Flags(DDL_FLAG_PLAIN_MPI).Buffer(memory, memory, 1), "adasum: for all_reduce");
      Call check(DDL_BROADCAST, "x");
      refused(check.Flags(DDL_FLAG_CHECK).Buffer(memory, memory, 1), "check");
      Call tolerance(DDL_ALL_REDUCE, "x");
      tolerance.request.tolerance = std::nan("");
      refused(tolerance.Flags(DDL_FLAG_CHECK).Buffer(memory, memory, 1), "tolerance");
    }
    EXPECT_EQ(SumOfOne(comm, "x").code, DDL_OK);
  });
}

// Adaptive sums treat each buffer separately.
TEST(AdasumTest, DifferentTensorBoundariesOnOneRankFailEverywhere) {
  RunRanks({0, 0, 2}, [](ddl_comm* comm, int rank) {
    std::vector<float> data(5, 1);
    for (const bool differs : {true, false}) {
      Call call(DDL_ALL_REDUCE, "grads");
      const uint64_t first = differs && rank == 2 ? 3 : 2;
      call.Op(DDL_ADASUM).Buffer(data.data(), data.data(), first);
      const Outcome outcome = call.Buffer(data.data() + first, data.data() + first, 5 - first).Run(comm);
      EXPECT_EQ(outcome.code, differs ? DDL_FAILED_PRECONDITION : DDL_OK) << outcome.message;
      EXPECT_TRUE(!differs || Contains(outcome.message, "shapes or plan"));
    }
    EXPECT_EQ(data, std::vector<float>(5, 1));
  });
}

// ---- a check that fails ---------------------------------------------------------------------------------------------

int (*plain_all_reduce)(void*, const void*, void*, uint64_t, uint32_t, uint32_t) = nullptr;

int DistortedAllReduce(void* self, const void* in, void* out, uint64_t count, uint32_t dtype, uint32_t op) {
  const int code = plain_all_reduce(self, in, out, count, dtype, op);
  static_cast<float*>(out)[count - 1] += 0.5f;
  return code;
}

TEST(CheckTest, FailsOnEveryRankWhenOneSeesADifference) {
  RunOptions options;
  std::mutex mutex;
  options.tweak = [&](ddl_transport& transport) {
    const std::lock_guard<std::mutex> lock(mutex);
    plain_all_reduce = transport.plain_all_reduce;
    if (transport.rank == 1) transport.plain_all_reduce = DistortedAllReduce;
  };
  RunRanks(
      {0, 0, 2},
      [](ddl_comm* comm, int) {
        std::vector<float> data(100, 1);
        for (const double tolerance : {0.1, 0.2}) {  // the difference is 0.5 of 3.5
          Call call(DDL_ALL_REDUCE, "grads");
          call.Flags(DDL_FLAG_CHECK).Buffer(data.data(), data.data(), data.size()).request.tolerance = tolerance;
          const Outcome outcome = call.Run(comm);
          EXPECT_EQ(outcome.code, tolerance < 0.14 ? DDL_DATA_LOSS : DDL_OK) << outcome.message;
          if (outcome.code != DDL_OK) {
            EXPECT_TRUE(Contains(outcome.message, "grads"));
            EXPECT_TRUE(Contains(outcome.message, "0.143"));
          }
          data.assign(100, 1);
        }
      },
      options);
}

}  // namespace
}  // namespace ddl_test
