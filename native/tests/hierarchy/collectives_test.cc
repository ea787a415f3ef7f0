// Compares every collective on every topology with values computed here, through the public C ABI only.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/oracle.h"
#include "test_data.h"
#include "thread_group.h"
#include "topologies.h"

namespace ddl_test {
namespace {

using Bytes = std::vector<uint8_t>;

void PutNumber(ddl_dtype dtype, Bytes& bytes, size_t i, double value) {
  switch (dtype) {
    case DDL_FLOAT32:
      return Put(bytes, i, static_cast<float>(value));
    case DDL_FLOAT64:
      return Put(bytes, i, value);
    case DDL_FLOAT16:
      return Put(bytes, i, EncodeHalf(kFloat16, value));
    case DDL_BFLOAT16:
      return Put(bytes, i, EncodeHalf(kBfloat16, value));
    case DDL_INT32:
      return Put(bytes, i, static_cast<int32_t>(value));
    case DDL_INT64:
      return Put(bytes, i, static_cast<int64_t>(value));
    case DDL_UINT8:
      return Put(bytes, i, static_cast<uint8_t>(value));
    default:
      return Put(bytes, i, static_cast<int8_t>(value));
  }
}

// Small whole numbers: sums and products of eight of them are exact in every dtype, in any order.
double Number(ddl_dtype dtype, ddl_op op, int rank, size_t i) {
  if (op == DDL_PRODUCT) return (i + static_cast<size_t>(rank)) % 3 == 0 ? 2 : 1;
  const double value = static_cast<double>((i * 7 + static_cast<size_t>(rank) * 5) % 11);
  return dtype == DDL_UINT8 ? value : value - 5;
}

Bytes Numbers(ddl_dtype dtype, ddl_op op, int rank, size_t count) {
  Bytes bytes(count * ddl::DtypeSize(dtype));
  for (size_t i = 0; i < count; ++i) PutNumber(dtype, bytes, i, Number(dtype, op, rank, i));
  return bytes;
}

double Reduced(ddl_dtype dtype, ddl_op op, int size, size_t i) {
  double result = Number(dtype, op, 0, i);
  for (int rank = 1; rank < size; ++rank) {
    const double next = Number(dtype, op, rank, i);
    result = op == DDL_MIN       ? std::min(result, next)
             : op == DDL_MAX     ? std::max(result, next)
             : op == DDL_PRODUCT ? result * next
                                 : result + next;
  }
  if (op == DDL_MEAN) result = dtype >= DDL_INT32 ? std::trunc(result / size) : result / size;
  return result;
}

Bytes ReducedNumbers(ddl_dtype dtype, ddl_op op, int size, size_t count) {
  Bytes bytes(count * ddl::DtypeSize(dtype));
  for (size_t i = 0; i < count; ++i) PutNumber(dtype, bytes, i, Reduced(dtype, op, size, i));
  return bytes;
}

// A mean over several groups is a sum of quotients: right within some roundings.
double Tolerance(ddl_dtype dtype, ddl_op op) {
  if (op != DDL_MEAN || dtype >= DDL_INT32) return 0;
  return dtype == DDL_FLOAT64 ? 1e-14 : dtype == DDL_FLOAT32 ? 1e-6 : dtype == DDL_FLOAT16 ? 5e-3 : 4e-2;
}

void ExpectNear(ddl_dtype dtype, ddl_op op, const Bytes& received, const Bytes& expected, const std::string& what) {
  ASSERT_EQ(received.size(), expected.size()) << what;
  if (received == expected) return;
  const size_t count = expected.size() / ddl::DtypeSize(dtype);
  ASSERT_LE(ddl::MaxRelativeDifference(dtype, received.data(), expected.data(), count), Tolerance(dtype, op))
      << what << " " << ddl::DtypeName(dtype) << " " << ddl::OpName(op) << " count " << count;
}

// Collects the results of all ranks, and compares them bit by bit.
class Results {
 public:
  void Add(const std::string& key, const Bytes& bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [at, inserted] = first_.try_emplace(key, bytes);
    EXPECT_TRUE(inserted || at->second == bytes) << key << ": ranks have different bits";
  }

 private:
  std::mutex mutex_;
  std::map<std::string, Bytes> first_;
};

// Collectives that only move bytes: one dtype is enough under a sanitizer.
std::vector<ddl_dtype> Moved(std::vector<ddl_dtype> dtypes) {
  if (kSanitized) dtypes.resize(1);
  return dtypes;
}

class CollectivesTest : public testing::TestWithParam<size_t> {
 protected:
  const std::vector<int>& group() const { return Topologies()[GetParam()].group; }
  int size() const { return static_cast<int>(group().size()); }
  RunOptions LargeSlots() const {
    RunOptions options;
    options.outer.assign(Topologies()[GetParam()].outer.begin(), Topologies()[GetParam()].outer.end());
    return options;
  }
  // Slots of the smallest size, so that small arrays already take several steps.
  RunOptions SmallSlots() const {
    RunOptions options = LargeSlots();
    options.staging_bytes = 1;
    return options;
  }
  std::vector<size_t> Counts() const {
    return {0, 1, static_cast<size_t>(size()) - 1, 1009, kSanitized ? size_t{9001} : size_t{30011}};
  }
};

// Under a sanitizer, one dtype of each kind: synchronisation does not depend on it, and other tests test the kernels.
const std::vector<ddl_op> kOps = kSanitized ? std::vector<ddl_op>{DDL_SUM, DDL_MEAN}
                                            : std::vector<ddl_op>{DDL_SUM, DDL_MEAN, DDL_MIN, DDL_MAX, DDL_PRODUCT};
const std::vector<ddl_dtype> kDtypes = kSanitized
                                           ? std::vector<ddl_dtype>{DDL_FLOAT32, DDL_BFLOAT16, DDL_INT8}
                                           : std::vector<ddl_dtype>{DDL_FLOAT32, DDL_FLOAT64, DDL_FLOAT16, DDL_BFLOAT16,
                                                                    DDL_INT32,   DDL_INT64,   DDL_UINT8,   DDL_INT8};

TEST_P(CollectivesTest, AllReduce) {
  Results results;
  std::map<std::string, Bytes> expected;
  const auto key = [](ddl_dtype dtype, ddl_op op, size_t count) {
    return std::string(ddl::DtypeName(dtype)) + " " + ddl::OpName(op) + " " + std::to_string(count);
  };
  for (const ddl_dtype dtype : kDtypes) {
    for (const ddl_op op : kOps) {
      for (const size_t count : Counts()) expected[key(dtype, op, count)] = ReducedNumbers(dtype, op, size(), count);
    }
  }
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        for (const ddl_dtype dtype : kDtypes) {
          for (const ddl_op op : kOps) {
            for (const size_t count : Counts()) {
              const Bytes in = Numbers(dtype, op, rank, count);
              Bytes out(in.size(), 0xa5);
              const bool in_place = count % 2 == 1;
              if (in_place) out = in;
              const Outcome outcome = Call(DDL_ALL_REDUCE, "grads")
                                          .Dtype(dtype)
                                          .Op(op)
                                          .Buffer(in_place ? out.data() : in.data(), out.data(), count)
                                          .Run(comm);
              ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
              const std::string what = key(dtype, op, count);
              ExpectNear(dtype, op, out, expected.at(what), "all_reduce");
              results.Add(what, out);
            }
          }
        }
      },
      SmallSlots());
}

// Random bits make the order of a sum visible, so equal bits on all ranks and from run to run mean a fixed order.
TEST_P(CollectivesTest, AllReduceIsBitwiseEqualOnAllRanksAndEveryTime) {
  Results results;
  const size_t count = 20011;
  for (int run = 0; run < 2; ++run) {
    RunRanks(
        group(),
        [&](ddl_comm* comm, int rank) {
          for (const ddl_dtype dtype : kDtypes) {
            for (const ddl_op op : kOps) {
              const Bytes in = RandomElements(dtype, count, 7 + rank);
              // A different address on each rank, because alignment must not matter.
              Bytes out(in.size() + 64 * ddl::DtypeSize(dtype));
              const size_t shift = static_cast<size_t>(rank * 3 + run) * ddl::DtypeSize(dtype);
              ASSERT_EQ(Call(DDL_ALL_REDUCE, "x")
                            .Dtype(dtype)
                            .Op(op)
                            .Buffer(in.data(), out.data() + shift, count)
                            .Run(comm)
                            .code,
                        DDL_OK);
              results.Add(
                  std::string(ddl::DtypeName(dtype)) + " " + ddl::OpName(op),
                  Bytes(out.begin() + static_cast<long>(shift), out.begin() + static_cast<long>(shift + in.size())));
            }
          }
        },
        SmallSlots());
  }
}

TEST_P(CollectivesTest, AllReduceOfManyBuffers) {
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        const size_t count = 25013;
        for (const ddl_dtype dtype : {DDL_FLOAT32, DDL_BFLOAT16, DDL_INT8}) {
          const Bytes in = Numbers(dtype, DDL_SUM, rank, count);
          Bytes out = in;
          Call call(DDL_ALL_REDUCE, "bucket");
          call.Dtype(dtype);
          // The cuts differ between ranks: only the concatenation matters. Some buffers are empty, some in place.
          Random random(rank + 1);
          for (size_t at = 0; at < count;) {
            const size_t n = random.Below(6) == 0 ? 0 : std::min<size_t>(random.Below(2000), count - at);
            const size_t offset = at * ddl::DtypeSize(dtype);
            call.Buffer(random.Below(2) == 0 ? in.data() + offset : out.data() + offset, out.data() + offset, n);
            at += n;
          }
          const Outcome outcome = call.Run(comm);
          ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
          ExpectNear(dtype, DDL_SUM, out, ReducedNumbers(dtype, DDL_SUM, size(), count), "bucket");
        }
      },
      SmallSlots());
}

TEST_P(CollectivesTest, AllReduceOfMoreThanTheStagingMemory) {
  if (kSanitized && size() > 2) GTEST_SKIP() << "too slow under a sanitizer";
  const size_t count = kSanitized ? 2'200'011 : 4'300'011;  // more than one block of the ring between groups
  const Bytes expected = ReducedNumbers(DDL_FLOAT32, DDL_SUM, size(), count);
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        Bytes data = Numbers(DDL_FLOAT32, DDL_SUM, rank, count);
        const Outcome outcome = Call(DDL_ALL_REDUCE, "large").Buffer(data.data(), data.data(), count).Run(comm);
        ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
        ASSERT_TRUE(data == expected);
      },
      LargeSlots());
}

TEST_P(CollectivesTest, AllReduceByMpiAndChecked) {
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        for (const uint32_t flags : {DDL_FLAG_PLAIN_MPI, DDL_FLAG_CHECK}) {
          for (const ddl_dtype dtype : kDtypes) {
            for (const ddl_op op : kOps) {
              const size_t count = 501;
              Bytes data = Numbers(dtype, op, rank, count);
              Call call(DDL_ALL_REDUCE, "checked");
              call.Dtype(dtype).Op(op).Flags(flags).Buffer(data.data(), data.data(), count);
              call.request.tolerance = 0.05;
              const Outcome outcome = call.Run(comm);
              ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
              ExpectNear(dtype, op, data, ReducedNumbers(dtype, op, size(), count), "checked");
            }
          }
        }
      },
      SmallSlots());
}

TEST_P(CollectivesTest, BroadcastFromEveryRoot) {
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        for (int root = 0; root < size(); ++root) {
          for (const size_t count : Counts()) {
            for (const ddl_dtype dtype : Moved({DDL_FLOAT64, DDL_UINT8})) {
              // Two buffers; the second is in place on the root, too.
              const size_t half = count / 2 * ddl::DtypeSize(dtype);
              const Bytes sent = RandomElements(dtype, count, 1000 + root);
              Bytes out(sent.size());
              if (rank == root)
                std::copy(sent.begin() + static_cast<long>(half), sent.end(), out.begin() + static_cast<long>(half));
              const Outcome outcome = Call(DDL_BROADCAST, "weights")
                                          .Dtype(dtype)
                                          .Root(root)
                                          .Buffer(rank == root ? sent.data() : nullptr, out.data(), count / 2)
                                          .Buffer(out.data() + half, out.data() + half, count - count / 2)
                                          .Run(comm);
              ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
              ASSERT_TRUE(out == sent) << "root " << root << ", count " << count;
            }
          }
        }
      },
      SmallSlots());
}

TEST_P(CollectivesTest, ReduceScatterOfRows) {
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        const std::pair<size_t, size_t> shapes[] = {{0, 3}, {1, 5},  {static_cast<size_t>(size()), 1},
                                                    {7, 0}, {29, 7}, {1009, 11}};
        for (const ddl_dtype dtype : kDtypes) {
          for (const ddl_op op : kOps) {
            for (const auto& [rows, row_count] : shapes) {
              const size_t count = rows * row_count;
              const size_t begin = rows / size() * rank + std::min<size_t>(rank, rows % size());
              const size_t own = rows / size() + (static_cast<size_t>(rank) < rows % size() ? 1 : 0);
              const Bytes in = Numbers(dtype, op, rank, count);
              const Bytes all = ReducedNumbers(dtype, op, size(), count);
              const size_t row_bytes = row_count * ddl::DtypeSize(dtype);
              const Bytes expected(all.begin() + static_cast<long>(begin * row_bytes),
                                   all.begin() + static_cast<long>((begin + own) * row_bytes));
              Bytes out(own * row_bytes + 64, 0xa5);
              const Outcome outcome = Call(DDL_REDUCE_SCATTER, "scatter")
                                          .Dtype(dtype)
                                          .Op(op)
                                          .Rows(rows, row_count)
                                          .Buffer(in.data(), out.data(), count)
                                          .Run(comm);
              ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
              ASSERT_EQ(std::count(out.end() - 64, out.end(), 0xa5), 64) << "wrote beyond its chunk";
              out.resize(own * row_bytes);
              ExpectNear(dtype, op, out, expected, "reduce_scatter");
            }
          }
        }
      },
      SmallSlots());
}

TEST_P(CollectivesTest, AllGatherOfUnevenRows) {
  RunRanks(
      group(),
      [&](ddl_comm* comm, int rank) {
        // Rows of rank r: equal, ascending, empty on most ranks, none at all, many.
        const std::function<size_t(int)> plans[] = {
            [](int) { return size_t{3}; }, [](int r) { return static_cast<size_t>(r); },
            [&](int r) { return r == size() - 1 ? size_t{5} : size_t{0}; }, [](int) { return size_t{0}; },
            [](int r) { return static_cast<size_t>(2000 + 171 * r); }};
        for (const auto& rows_of : plans) {
          for (const size_t row_count : {size_t{1}, size_t{5}, size_t{0}}) {
            for (const ddl_dtype dtype : Moved({DDL_INT8, DDL_FLOAT32, DDL_INT64})) {
              Bytes expected;
              for (int r = 0; r < size(); ++r) {
                const Bytes part = RandomElements(dtype, rows_of(r) * row_count, 50 + r);
                expected.insert(expected.end(), part.begin(), part.end());
              }
              const Bytes in = RandomElements(dtype, rows_of(rank) * row_count, 50 + rank);
              Call call(DDL_ALL_GATHER, "gather");
              call.Dtype(dtype).Rows(rows_of(rank), row_count).Buffer(in.data(), nullptr, rows_of(rank) * row_count);
              ddl_work* const work = call.Start(comm);
              ASSERT_EQ(ddl_work_wait(work, 60'000), 1);
              ASSERT_EQ(ddl_work_failure(work), nullptr);
              for (int r = 0; r < size(); ++r) ASSERT_EQ(ddl_work_rows(work)[r], rows_of(r));
              if (!expected.empty()) {
                ASSERT_EQ(std::memcmp(ddl_work_data(work), expected.data(), expected.size()), 0);
              }
              ddl_work_free(work);
            }
          }
        }
      },
      SmallSlots());
}

TEST_P(CollectivesTest, BarrierWaitsForAll) {
  std::atomic<int> arrived{0};
  RunRanks(group(), [&](ddl_comm* comm, int) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      ASSERT_EQ(Call(DDL_BARRIER, "barrier").Flags(DDL_FLAG_BLOCKING).Run(comm).code, DDL_OK);
      ASSERT_GE(arrived.load(), round * size());
    }
  });
}

TEST_P(CollectivesTest, KnowsItsLocalRank) {
  RunRanks(group(), [&](ddl_comm* comm, int rank) {
    EXPECT_EQ(ddl_rank(comm), rank);
    EXPECT_EQ(ddl_size(comm), size());
    const long before = std::count(group().begin(), group().begin() + rank, group()[rank]);
    EXPECT_EQ(ddl_local_rank(comm), before);
    EXPECT_EQ(ddl_local_size(comm), std::count(group().begin(), group().end(), group()[rank]));
    EXPECT_NE(std::string(ddl_describe(comm)).find(ddl::InstructionSetName()), std::string::npos);
  });
}

INSTANTIATE_TEST_SUITE_P(Topologies, CollectivesTest, testing::Range(size_t{0}, Topologies().size()),
                         [](const auto& info) { return std::string("of_") + Topologies()[info.param].name; });

}  // namespace
}  // namespace ddl_test
