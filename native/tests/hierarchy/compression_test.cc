// Compressed all-reduces: data between groups is rounded to 16 bits. The oracle follows each element around its
// ring with the scalars of common/half.h, which is the only core code that it uses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/range.h"
#include "common/half.h"
#include "engine/feedback.h"
#include "several_groups.h"
#include "test_data.h"
#include "thread_group.h"
#include "topologies.h"
#include "transport_spy.h"

namespace ddl_test {
namespace {

using Floats = std::vector<float>;

constexpr ddl_compression kCompressions[] = {DDL_COMPRESSION_BFLOAT16, DDL_COMPRESSION_FLOAT16};

Floats Numbers(int rank, size_t count, int step = 0) {
  Random random(static_cast<uint64_t>(1000 * step + rank + 1));
  Floats numbers(count);
  for (float& number : numbers) {
    number = static_cast<float>(static_cast<int64_t>(random.Next()) >> 40) * 0x1p-24f;
    if (random.Below(16) == 0) number *= 0x1p-20f;
  }
  return numbers;
}

// Rounds a part in place, as on arrival at the next rank.
void RoundPart(ddl_compression compression, float* part, size_t count) {
  float scale = 1;
  if (compression == DDL_COMPRESSION_FLOAT16) {
    float largest = 0;
    for (size_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(part[i]));
    while (largest > 0 && largest * scale < 0x1p14f) scale *= 2;
    while (largest * scale >= 0x1p15f) scale /= 2;
  }
  for (size_t i = 0; i < count; ++i) {
    part[i] = compression == DDL_COMPRESSION_FLOAT16 ? ddl::Float16::FromFloat(part[i] * scale).ToFloat() / scale
                                                     : ddl::Bfloat16::FromFloat(part[i]).ToFloat();
  }
}

// One sum over groups in a single ring. `errors`: the rounding errors that each rank keeps, by group and element.
Floats OracleSum(const std::vector<std::vector<int>>& groups, const std::vector<Floats>& inputs, size_t num_shards,
                 ddl_compression compression, bool mean, std::vector<Floats>* errors) {
  const size_t count = inputs[0].size();
  const size_t num_groups = groups.size();
  std::vector<Floats> of_group;
  for (size_t g = 0; g < num_groups; ++g) {
    Floats sum = inputs[static_cast<size_t>(groups[g][0])];
    for (size_t m = 1; m < groups[g].size(); ++m) {
      for (size_t i = 0; i < count; ++i) sum[i] += inputs[static_cast<size_t>(groups[g][m])][i];
    }
    if (errors != nullptr) {
      for (size_t i = 0; i < count; ++i) sum[i] += (*errors)[g][i];
    }
    of_group.push_back(sum);
  }
  const auto round_and_keep = [&](float* values, size_t group, size_t at, size_t n, float unit) {
    const Floats before(values, values + n);
    RoundPart(compression, values, n);
    for (size_t i = 0; errors != nullptr && i < n; ++i) (*errors)[group][at + i] = (before[i] - values[i]) * unit;
  };
  Floats result(count);
  for (const ddl::Range& shard : ddl::SplitEvenly(count, static_cast<int>(num_shards))) {
    const std::vector<ddl::Range> parts = ddl::SplitEvenly(shard.size(), static_cast<int>(num_groups));
    for (size_t owner = 0; owner < num_groups; ++owner) {
      const size_t at = shard.begin + parts[owner].begin;
      const size_t n = parts[owner].size();
      // The part starts after its owner, and reaches it last.
      Floats sum(n);
      for (size_t hop = 1; hop <= num_groups; ++hop) {
        const size_t group = (owner + hop) % num_groups;
        for (size_t i = 0; i < n; ++i) sum[i] = hop == 1 ? of_group[group][at + i] : sum[i] + of_group[group][at + i];
        const float size = static_cast<float>(inputs.size());
        const bool divides = mean && hop == num_groups;
        for (size_t i = 0; divides && i < n; ++i) sum[i] /= size;
        round_and_keep(sum.data(), group, at, n, divides ? size : 1);
      }
      std::copy(sum.begin(), sum.end(), result.begin() + static_cast<long>(at));
    }
  }
  return result;
}

class Result {
 public:
  void Add(const std::string& key, const Floats& values) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [at, inserted] = first_.try_emplace(key, values);
    const bool same =
        at->second.size() == values.size() &&
        (values.empty() || std::memcmp(at->second.data(), values.data(), values.size() * sizeof(float)) == 0);
    EXPECT_TRUE(inserted || same) << key << ": ranks have different bits";
  }
  const Floats& operator[](const std::string& key) const { return first_.at(key); }

 private:
  std::mutex mutex_;
  std::map<std::string, Floats> first_;
};

Outcome Compressed(ddl_comm* comm, const std::string& name, ddl_compression compression, Floats& data,
                   ddl_op op = DDL_SUM, const char* feedback = nullptr) {
  Call call(DDL_ALL_REDUCE, name);
  call.Op(op).Buffer(data.data(), data.data(), data.size());
  call.request.compression = compression;
  call.request.feedback = feedback;
  return call.Run(comm);
}

class CompressionTest : public testing::TestWithParam<size_t> {
 protected:
  const Topology& topology() const { return Topologies()[GetParam()]; }
  std::vector<std::vector<int>> groups() const {
    std::map<int, std::vector<int>> members;
    for (int rank = 0; rank < topology().size(); ++rank) members[topology().group[rank]].push_back(rank);
    std::vector<std::vector<int>> found;
    for (const auto& [leader, ranks] : members) found.push_back(ranks);
    return found;
  }
  RunOptions Box() const {
    RunOptions options;
    options.outer.assign(topology().outer.begin(), topology().outer.end());
    return options;
  }
};

TEST_P(CompressionTest, EqualsTheRingStepByStep) {
  if (!topology().outer.empty() || groups().size() == 1) GTEST_SKIP() << "not a single ring";
  size_t shards = groups()[0].size();
  for (const auto& members : groups()) shards = std::min(shards, members.size());
  const std::set<size_t> counts = {0, 1, static_cast<size_t>(topology().size()) - 1, 1009,
                                   kSanitized ? size_t{9001} : size_t{30011}};
  Result results;
  const int steps = 3;
  const auto key = [](size_t count, ddl_compression compression, ddl_op op, bool feedback, int step) {
    return std::to_string(count) + " elements, " + std::to_string(compression) + (op == DDL_MEAN ? " mean" : " sum") +
           (feedback ? " fed back" : "") + ", step " + std::to_string(step);
  };
  RunRanks(
      topology().group,
      [&](ddl_comm* comm, int rank) {
        for (const size_t count : counts) {
          for (const ddl_compression compression : kCompressions) {
            for (const ddl_op op : {DDL_SUM, DDL_MEAN}) {
              for (const bool feedback : {false, true}) {
                const std::string kept = "key " + key(count, compression, op, feedback, 0);
                for (int step = 0; step < steps; ++step) {
                  Floats data = Numbers(rank, count, step);
                  const Outcome outcome =
                      Compressed(comm, "x", compression, data, op, feedback ? kept.c_str() : nullptr);
                  ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
                  results.Add(key(count, compression, op, feedback, step), data);
                }
              }
            }
          }
        }
      },
      Box());
  for (const size_t count : counts) {
    for (const ddl_compression compression : kCompressions) {
      for (const ddl_op op : {DDL_SUM, DDL_MEAN}) {
        for (const bool feedback : {false, true}) {
          std::vector<Floats> errors(groups().size(), Floats(count));
          for (int step = 0; step < steps; ++step) {
            std::vector<Floats> inputs;
            for (int rank = 0; rank < topology().size(); ++rank) inputs.push_back(Numbers(rank, count, step));
            const Floats expected =
                OracleSum(groups(), inputs, shards, compression, op == DDL_MEAN, feedback ? &errors : nullptr);
            const std::string what = key(count, compression, op, feedback, step);
            ASSERT_EQ(results[what], expected) << what;
          }
        }
      }
    }
  }
}

// Every box, several blocks, and all kinds of numbers: equal results everywhere, near the sum; exact on one host.
TEST_P(CompressionTest, IsBitwiseEqualOnAllRanks) {
  const size_t count = kSanitized ? 40'013 : 300'021;
  const bool alone = groups().size() == 1;
  Result results;
  RunRanks(
      topology().group,
      [&](ddl_comm* comm, int rank) {
        for (const ddl_compression compression : kCompressions) {
          const std::vector<uint8_t> bits = RandomElements(DDL_FLOAT32, count, 7 + static_cast<uint64_t>(rank));
          Floats wild(count);
          std::memcpy(wild.data(), bits.data(), bits.size());
          ASSERT_EQ(Compressed(comm, "wild", compression, wild).code, DDL_OK);
          results.Add("wild " + std::to_string(compression), wild);
          Floats exact = Numbers(rank, count);
          Floats data = exact;
          ASSERT_EQ(Call(DDL_ALL_REDUCE, "exact").Buffer(exact.data(), exact.data(), count).Run(comm).code, DDL_OK);
          ASSERT_EQ(Compressed(comm, "x", compression, data).code, DDL_OK);
          results.Add("x " + std::to_string(compression), data);
          if (alone) {
            ASSERT_EQ(data, exact);
            continue;
          }
          // Half a unit in the last place per hop, of 8 bits or of 11.
          const float unit = compression == DDL_COMPRESSION_BFLOAT16 ? 0x1p-9f : 0x1p-12f;
          const float most = unit * 8 * static_cast<float>(topology().size());
          bool differs = false;
          for (size_t i = 0; i < count; ++i) {
            ASSERT_LE(std::abs(data[i] - exact[i]), most) << i;
            differs = differs || data[i] != exact[i];
          }
          ASSERT_TRUE(differs) << "nothing was rounded";
        }
      },
      Box());
}

TEST_P(CompressionTest, FeedbackCompensatesRounding) {
  const size_t count = 1009;
  const int steps = 32;
  RunRanks(
      topology().group,
      [&](ddl_comm* comm, int rank) {
        const bool alone = groups().size() == 1;
        for (const ddl_compression compression : kCompressions) {
          for (const ddl_op op : {DDL_SUM, DDL_MEAN}) {
            Floats exact = Numbers(rank, count);
            ASSERT_EQ(Call(DDL_ALL_REDUCE, "exact").Op(op).Buffer(exact.data(), exact.data(), count).Run(comm).code,
                      DDL_OK);
            std::vector<double> total(count), fed_total(count);
            const std::string key = "x" + std::to_string(compression) + std::to_string(op);
            for (int step = 0; step < steps; ++step) {
              Floats data = Numbers(rank, count);
              Floats fed = data;
              ASSERT_EQ(Compressed(comm, "x", compression, data, op).code, DDL_OK);
              ASSERT_EQ(Compressed(comm, "x", compression, fed, op, key.c_str()).code, DDL_OK);
              for (size_t i = 0; i < count; ++i) total[i] += data[i];
              for (size_t i = 0; i < count; ++i) fed_total[i] += fed[i];
            }
            double error = 0, fed_error = 0;
            for (size_t i = 0; i < count; ++i) {
              error = std::max(error, std::abs(total[i] / steps - exact[i]));
              fed_error = std::max(fed_error, std::abs(fed_total[i] / steps - exact[i]));
            }
            if (alone) {
              ASSERT_LT(error, 1e-6);
            } else {
              ASSERT_LT(fed_error * 4, error) << "compression " << compression << " op " << op;
            }
          }
        }
      },
      Box());
}

TEST_P(CompressionTest, Float16NeitherOverflowsNorVanishes) {
  RunRanks(
      topology().group,
      [&](ddl_comm* comm, int) {
        for (const float number : {1e6f, 1e30f, 1e-9f, 1e-30f}) {
          Floats data(257, number);
          ASSERT_EQ(Compressed(comm, "x", DDL_COMPRESSION_FLOAT16, data, DDL_MEAN).code, DDL_OK);
          for (const float mean : data) ASSERT_NEAR(mean / number, 1, 0.01);
        }
        // A NaN affects neither its neighbours nor the next sum.
        for (int step = 0; step < 2; ++step) {
          Floats data(257, 3.0f);
          if (step == 0) data[5] = INFINITY;
          if (step == 0) data[6] = NAN;
          ASSERT_EQ(Compressed(comm, "x", DDL_COMPRESSION_FLOAT16, data, DDL_MEAN, "kept").code, DDL_OK);
          ASSERT_EQ(std::isinf(data[5]), step == 0);
          ASSERT_EQ(std::isnan(data[6]), step == 0);
          ASSERT_NEAR(data[4], 3, 0.01);
          if (step == 1) {
            ASSERT_NEAR(data[6], 3, 0.01);
          }
        }
      },
      Box());
}

INSTANTIATE_TEST_SUITE_P(Topologies, CompressionTest, testing::Range<size_t>(0, Topologies().size()),
                         [](const auto& info) { return std::string("of_") + Topologies()[info.param].name; });

TEST(Compression, HalvesTheBytesOfMessages) {
  const size_t count = 200'000;
  std::map<int, size_t> sent;  // by compression
  for (const ddl_compression compression : {DDL_COMPRESSION_NONE, DDL_COMPRESSION_BFLOAT16, DDL_COMPRESSION_FLOAT16}) {
    auto spies = Spies(4);
    RunRanks(
        {0, 0, 2, 2},
        [&](ddl_comm* comm, int rank) {
          Floats data = Numbers(rank, count);
          EXPECT_EQ(Compressed(comm, "x", compression, data).code, DDL_OK);
        },
        Spied(spies));
    for (const auto& spy : spies) {
      for (const auto& [data, bytes] : spy->lent) sent[compression] += bytes;
    }
  }
  EXPECT_EQ(sent[DDL_COMPRESSION_BFLOAT16] * 2, sent[DDL_COMPRESSION_NONE]);
  EXPECT_GE(sent[DDL_COMPRESSION_FLOAT16], sent[DDL_COMPRESSION_BFLOAT16]);
  EXPECT_LE(sent[DDL_COMPRESSION_FLOAT16], sent[DDL_COMPRESSION_BFLOAT16] + 1000);
}

TEST(Compression, MustBeTheSameOnAllRanks) {
  for (const auto& group : Groups()) {
    RunRanks(group, [&](ddl_comm* comm, int rank) {
      Floats data(3, 1.0f);
      const Outcome outcome = Compressed(comm, "x", rank == 0 ? DDL_COMPRESSION_FLOAT16 : DDL_COMPRESSION_NONE, data);
      EXPECT_EQ(outcome.code, DDL_FAILED_PRECONDITION);
      EXPECT_TRUE(Contains(outcome.message, "compression: float16 on rank(s) 0, none on rank(s) 1"));
      EXPECT_EQ(SumOfOne(comm, "y").code, DDL_OK);
    });
  }
}

TEST(Compression, IsRefusedWhereItDoesNotApply) {
  RunRanks({0, 1}, [&](ddl_comm* comm, int) {
    Floats data(4, 1.0f);
    const auto refused = [&](ddl_dtype dtype, ddl_op op, uint32_t compression, uint32_t flags) {
      Call call(DDL_ALL_REDUCE, "x");
      call.Dtype(dtype).Op(op).Flags(flags).Buffer(data.data(), data.data(), 1);
      call.request.compression = compression;
      return call.Run(comm);
    };
    for (const Outcome& outcome : {refused(DDL_FLOAT64, DDL_SUM, DDL_COMPRESSION_BFLOAT16, 0),
                                   refused(DDL_INT32, DDL_SUM, DDL_COMPRESSION_BFLOAT16, 0),
                                   refused(DDL_FLOAT32, DDL_MAX, DDL_COMPRESSION_FLOAT16, 0),
                                   refused(DDL_FLOAT32, DDL_SUM, DDL_NUM_COMPRESSIONS, 0),
                                   refused(DDL_FLOAT32, DDL_SUM, DDL_COMPRESSION_FLOAT16, DDL_FLAG_PLAIN_MPI)}) {
      EXPECT_EQ(outcome.code, DDL_INVALID_ARGUMENT);
      EXPECT_TRUE(Contains(outcome.message, "compression: "));
    }
    EXPECT_EQ(refused(DDL_FLOAT32, DDL_MEAN, DDL_COMPRESSION_FLOAT16, DDL_FLAG_CHECK).code, DDL_OK);
  });
}

TEST(Feedback, KeepsTheMostRecentlyUsedWithinItsLimit) {
  ddl::Feedback feedback(100 * sizeof(float));
  feedback.Find("a", 60)->assign(60, 1);
  EXPECT_EQ(feedback.Trim(), "");
  feedback.Find("b", 30)->assign(30, 2);
  EXPECT_EQ(feedback.Trim(), "");
  EXPECT_EQ(feedback.Find("a", 60)->size(), 60u);
  feedback.Find("c", 20)->assign(20, 3);
  EXPECT_TRUE(Contains(feedback.Trim(), "'b'"));  // least recently used
  EXPECT_EQ(feedback.Find("a", 60)->size(), 60u);
  EXPECT_TRUE(feedback.Find("b", 30)->empty());
  EXPECT_TRUE(feedback.Find("a", 61)->empty()) << "of another count";
  feedback.Find("d", 500)->assign(500, 4);
  EXPECT_EQ(feedback.Trim(), "") << "says it once";
  EXPECT_EQ(feedback.Find("d", 500)->size(), 500u) << "the one in use is kept";
}

}  // namespace
}  // namespace ddl_test
