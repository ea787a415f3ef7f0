// Reduce-scatter and all-gather between the ranks' own buffers give the same bits as through slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "common/dtypes.h"
#include "shm/collectives.h"
#include "shm/peer_group.h"
#include "shm/tuned.h"
#include "test_data.h"

namespace ddl_test {
namespace {

using ddl::Algorithm;
using ddl::Scheme;
using ddl::Store;

constexpr Scheme kSlotScheme{Algorithm::kDirect, Store::kRepMovsb, Store::kCached, kSlotBytes};
constexpr ddl_dtype kDtypes[] = {DDL_FLOAT32, DDL_FLOAT64, DDL_FLOAT16, DDL_BFLOAT16,
                                 DDL_INT32,   DDL_INT64,   DDL_INT8,    DDL_UINT8};

// Numbers of elements of each rank: they differ by one, or one rank has all, or some have none.
std::vector<std::vector<uint64_t>> Plans(int size) {
  std::vector<std::vector<uint64_t>> plans;
  for (const uint64_t each : {0u, 1u, 333u, 9001u}) {
    std::vector<uint64_t> counts(static_cast<size_t>(size), each);
    ++counts[0];
    plans.push_back(counts);
  }
  plans.emplace_back(static_cast<size_t>(size), 0);
  plans.back()[static_cast<size_t>(size) - 1] = 4001;
  return plans;
}

// `bytes` as a view in pieces of `piece` elements each, `shift` bytes away from alignment.
class Shifted {
 public:
  Shifted(const std::vector<uint8_t>& bytes, size_t shift) : memory_(bytes.size() + shift), shift_(shift) {
    std::copy(bytes.begin(), bytes.end(), memory_.begin() + static_cast<std::ptrdiff_t>(shift));
  }
  View Part(size_t element_bytes, uint64_t begin, uint64_t count, uint64_t piece) {
    View view(element_bytes);
    for (uint64_t at = 0; at < count; at += piece) {
      view.Add(memory_.data() + shift_ + (begin + at) * element_bytes, std::min(piece, count - at));
    }
    return view;
  }
  const uint8_t* data() const { return memory_.data() + shift_; }

 private:
  std::vector<uint8_t> memory_;
  size_t shift_;
};

class CmaHalvesTest : public testing::TestWithParam<int> {
 protected:
  // The views of all ranks' parts of the whole, in rank order.
  static std::vector<View> Parts(Shifted& whole, size_t bytes, const std::vector<uint64_t>& counts, uint64_t piece) {
    std::vector<View> parts;
    uint64_t begin = 0;
    for (const uint64_t count : counts) {
      parts.push_back(whole.Part(bytes, begin, count, piece));
      begin += count;
    }
    return parts;
  }
};

// For the largest, pieces of 7 elements are more than a slot can list, so all ranks use slots.
TEST_P(CmaHalvesTest, ReduceScatterEqualsTheOneThroughSlotsBitForBit) {
  RunGroup(GetParam(), [&](GroupMemory& memory, ShmPipeline& pipeline) {
    const auto rank = static_cast<size_t>(memory.local_rank());
    for (const std::vector<uint64_t>& counts : Plans(GetParam())) {
      const uint64_t total = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
      for (const ddl_dtype dtype : kDtypes) {
        const size_t bytes = ddl::DtypeSize(dtype);
        const auto data = RandomElements(dtype, total, 10 + rank);
        const ddl::Reduction mean{dtype, ddl::IsFloating(dtype) ? DDL_MEAN : DDL_SUM, static_cast<double>(GetParam())};
        for (const uint64_t piece : {uint64_t{1} << 30, uint64_t{1000}, uint64_t{7}}) {
          for (const bool in_place : {false, true}) {
            Shifted whole(data, rank + 1);
            const std::vector<View> parts = Parts(whole, bytes, counts, piece + rank);
            Shifted slots(std::vector<uint8_t>(counts[rank] * bytes), 0);
            Shifted peers(std::vector<uint8_t>(counts[rank] * bytes), 3);
            const View expected = slots.Part(bytes, 0, counts[rank], 1u << 30);
            ASSERT_TRUE(ddl::SlotReduceScatter(pipeline, parts, expected, mean, kSlotScheme).ok());
            const View out = in_place ? parts[rank] : peers.Part(bytes, 0, counts[rank], 500);
            const Status status = ddl::CmaReduceScatter(pipeline, parts, out, mean, 4096);
            ASSERT_TRUE(status.ok()) << status.message();
            out.ForEach(0, out.count(), [&](const char* got, uint64_t at, uint64_t n) {
              ASSERT_EQ(std::memcmp(got, slots.data() + at * bytes, n * bytes), 0) << dtype << " " << at;
            });
          }
        }
      }
    }
  });
}

TEST_P(CmaHalvesTest, AllGatherMovesEveryRanksElements) {
  RunGroup(GetParam(), [&](GroupMemory& memory, ShmPipeline& pipeline) {
    const auto rank = static_cast<size_t>(memory.local_rank());
    for (const std::vector<uint64_t>& counts : Plans(GetParam())) {
      for (const size_t bytes : {1, 2, 4, 8}) {
        const uint64_t total = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
        std::vector<uint8_t> expected;
        for (size_t r = 0; r < counts.size(); ++r) {
          const auto part = RandomElements(DDL_UINT8, counts[r] * bytes, 20 + r);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        for (const uint64_t piece : {uint64_t{1} << 30, uint64_t{1000}, uint64_t{7}}) {
          for (const bool in_place : {false, true}) {
            Shifted whole(std::vector<uint8_t>(total * bytes), rank + 1);
            const std::vector<View> outs = Parts(whole, bytes, counts, piece + rank);
            Shifted own(RandomElements(DDL_UINT8, counts[rank] * bytes, 20 + rank), 2);
            View in = own.Part(bytes, 0, counts[rank], piece + rank);
            if (in_place) {
              ddl::CopyView(in, outs[rank], Store::kCached);
              in = outs[rank];
            }
            const Status status = ddl::CmaAllGather(pipeline, in, outs, 4096);
            ASSERT_TRUE(status.ok()) << status.message();
            ASSERT_TRUE(std::equal(expected.begin(), expected.end(), whole.data())) << bytes;
          }
        }
      }
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Ranks, CmaHalvesTest, testing::Values(2, 3, 4));

// The tuner of local rank 0 leads all ranks through its candidates, one after another.
TEST(TunedHalvesTest, EverySchemeGivesTheSameResult) {
  for (const bool reachable : {true, false}) {
    RunGroup(
        3,
        [](GroupMemory& memory, ShmPipeline& pipeline) {
          const auto rank = static_cast<size_t>(memory.local_rank());
          constexpr uint64_t kEach = 7001;
          std::vector<float> whole(3 * kEach);
          std::vector<float> sum(kEach);
          std::vector<float> all(3 * kEach);
          std::vector<View> parts;
          std::vector<View> outs;
          for (uint64_t j = 0; j < 3; ++j) {
            parts.emplace_back(sizeof(float), whole.data() + j * kEach, kEach);
            outs.emplace_back(sizeof(float), all.data() + j * kEach, kEach);
          }
          const View own(sizeof(float), sum.data(), kEach);
          for (int call = 0; call < 120; ++call) {
            for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(i % 101 + rank + call);
            ASSERT_TRUE(ddl::ShmReduceScatter(pipeline, parts, own, {DDL_FLOAT32, DDL_SUM, 1}).ok());
            ASSERT_TRUE(ddl::ShmAllGather(pipeline, own, outs).ok());
            for (size_t i = 0; i < all.size(); ++i) {
              ASSERT_EQ(all[i], static_cast<float>(3 * (i % 101 + call) + 3)) << i << " of call " << call;
            }
          }
        },
        reachable);
  }
}

TEST(CmaHalvesFailureTest, AllRanksFailWithTheReasonOfTheOneThatGivesUp) {
  std::vector<float> data[2] = {std::vector<float>(1 << 20, 1), std::vector<float>(1 << 20, 1)};
  for (const ddl_kind kind : {DDL_REDUCE_SCATTER, DDL_ALL_GATHER}) {
    std::atomic<bool> gave_up{false};
    Status statuses[2];
    RunGroup(
        2,
        [&](GroupMemory& memory, ShmPipeline& pipeline) {
          const auto rank = static_cast<size_t>(memory.local_rank());
          std::vector<float> out(1 << 20);
          constexpr uint64_t kHalf = 1 << 19;
          const auto halves = [](std::vector<float>& of) {
            return std::vector<View>{{sizeof(float), of.data(), kHalf}, {sizeof(float), of.data() + kHalf, kHalf}};
          };
          const View own(sizeof(float), out.data(), kHalf);
          statuses[rank] =
              kind == DDL_REDUCE_SCATTER
                  ? ddl::CmaReduceScatter(pipeline, halves(data[rank]), own, {DDL_FLOAT32, DDL_SUM, 1}, 4096)
                  : ddl::CmaAllGather(pipeline, halves(data[rank])[0], halves(out), 4096);
          if (rank == 0) gave_up = true;
        },
        true,
        // Rank 0 learns of a failure when it first checks, rank 1 from what rank 0 leaves.
        [&](int rank) { return rank == 0 || gave_up ? Status(DDL_ABORTED, "rank 7 died") : Status(); });
    if (testing::Test::IsSkipped()) return;
    for (const Status& status : statuses) {
      EXPECT_EQ(status.code(), DDL_ABORTED) << kind;
      EXPECT_EQ(status.message(), "rank 7 died") << kind;
    }
  }
}

}  // namespace
}  // namespace ddl_test
