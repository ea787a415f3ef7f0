// Compares adaptive sums on every topology with their definition, in float64 on complete vectors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/dtypes.h"
#include "test_data.h"
#include "thread_group.h"
#include "topologies.h"

namespace ddl_test {
namespace {

using Numbers = std::vector<double>;
using Bytes = std::vector<uint8_t>;

double Dot(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

Numbers SumOfTwo(const Numbers& a, const Numbers& b) {
  const double ab = Dot(a, b), aa = Dot(a, a), bb = Dot(b, b);
  Numbers sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    sum[i] = (aa == 0 ? 1 : 1 - ab / (2 * aa)) * a[i] + (bb == 0 ? 1 : 1 - ab / (2 * bb)) * b[i];
  }
  return sum;
}

Numbers AdaptiveSum(std::vector<Numbers> vectors) {
  while (vectors.size() > 1) {
    std::vector<Numbers> next;
    for (size_t i = 0; i + 1 < vectors.size(); i += 2) next.push_back(SumOfTwo(vectors[i], vectors[i + 1]));
    if (vectors.size() % 2 != 0) next.push_back(vectors.back());
    vectors = next;
  }
  return vectors[0];
}

double Get(ddl_dtype dtype, const Bytes& bytes, size_t i) {
  double number = 0;
  ddl::WithDtype(dtype, [&](auto element, const char*) {
    using T = decltype(element);
    std::memcpy(&element, bytes.data() + i * sizeof element, sizeof element);
    if constexpr (std::is_arithmetic_v<T>) {
      number = static_cast<double>(element);
    } else {
      number = element.ToFloat();
    }
  });
  return number;
}

Bytes Encoded(ddl_dtype dtype, const Numbers& numbers) {
  Bytes bytes(numbers.size() * ddl::DtypeSize(dtype));
  for (size_t i = 0; i < numbers.size(); ++i) {
    ddl::WithDtype(dtype, [&](auto element, const char*) {
      using T = decltype(element);
      if constexpr (std::is_arithmetic_v<T>) {
        Put(bytes, i, static_cast<T>(numbers[i]));
      } else {
        Put(bytes, i, T::FromFloat(static_cast<float>(numbers[i])));
      }
    });
  }
  return bytes;
}

// Vectors between parallel and opposite, so that neighbours are related in different ways; exact in bfloat16.
Numbers Values(int rank, size_t tensor, size_t count) {
  Random random(100 * static_cast<uint64_t>(rank) + tensor);
  Random shared(tensor);
  Numbers numbers(count);
  for (double& number : numbers) {
    number = static_cast<double>(random.Below(33)) / 16 - 1 + static_cast<double>(shared.Below(17)) / 8;
  }
  if (rank == 1 && tensor == 2) numbers.assign(count, 0);
  return numbers;
}

double Tolerance(ddl_dtype dtype) {
  return dtype == DDL_FLOAT64 ? 1e-12 : dtype == DDL_FLOAT32 ? 1e-5 : dtype == DDL_FLOAT16 ? 4e-3 : 3e-2;
}

const std::vector<ddl_dtype> kDtypes =
    kSanitized ? std::vector<ddl_dtype>{DDL_FLOAT32, DDL_BFLOAT16}
               : std::vector<ddl_dtype>{DDL_FLOAT32, DDL_FLOAT64, DDL_FLOAT16, DDL_BFLOAT16};

class AdaptiveSumTest : public testing::TestWithParam<size_t> {
 protected:
  const Topology& topology() const { return Topologies()[GetParam()]; }
  int size() const { return topology().size(); }
  RunOptions options() const {
    RunOptions options;
    options.outer = {topology().outer.begin(), topology().outer.end()};
    options.staging_bytes = 1;  // the smallest slots: several steps
    return options;
  }
};

TEST_P(AdaptiveSumTest, EqualsItsDefinition) {
  const std::vector<std::vector<size_t>> shapes = {{1009}, {3, 0, 701, 40'011, 1}, {1}, {}, {0}};
  // The ranks' inputs are exact in every dtype, so one computation serves all calls of all ranks.
  std::vector<std::vector<Numbers>> given(static_cast<size_t>(size()));  // by rank, then by tensor, shape after shape
  std::vector<Numbers> sums;
  for (const std::vector<size_t>& shape : shapes) {
    for (size_t t = 0; t < shape.size(); ++t) {
      std::vector<Numbers> parts;
      for (int r = 0; r < size(); ++r) parts.push_back(Values(r, t, shape[t]));
      sums.push_back(AdaptiveSum(parts));
      for (size_t r = 0; r < parts.size(); ++r) given[r].push_back(std::move(parts[r]));
    }
  }
  std::mutex mutex;
  std::map<std::string, Bytes> first;
  RunRanks(
      topology().group,
      [&](ddl_comm* comm, int rank) {
        const std::vector<Numbers>& mine = given[static_cast<size_t>(rank)];
        for (const ddl_dtype dtype : kDtypes) {
          for (size_t s = 0, before = 0; s < shapes.size(); before += shapes[s].size(), ++s) {
            for (const bool in_place : {false, true}) {
              std::vector<Bytes> in, out;
              const std::string name = std::string(ddl::DtypeName(dtype)) + std::to_string(s);
              Call call(DDL_ALL_REDUCE, name);
              for (size_t t = 0; t < shapes[s].size(); ++t) in.push_back(Encoded(dtype, mine[before + t]));
              out = in;
              for (size_t t = 0; t < shapes[s].size(); ++t) {
                call.Buffer(in_place ? out[t].data() : in[t].data(), out[t].data(), shapes[s][t]);
              }
              call.Dtype(dtype).Op(DDL_ADASUM);
              const bool inlined = in_place && call.TryRun(comm, 20'000) != 0;
              const Outcome outcome = inlined ? Outcome() : call.Run(comm);
              ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
              for (size_t t = 0; t < shapes[s].size(); ++t) {
                const Numbers& expected = sums[before + t];
                if (!in_place) {
                  ASSERT_EQ(in[t], Encoded(dtype, mine[before + t])) << "changed its input";
                }
                for (size_t i = 0; i < expected.size(); ++i) {
                  const double scale = std::max(1.0, std::fabs(expected[i]));
                  ASSERT_LE(std::fabs(Get(dtype, out[t], i) - expected[i]) / scale, Tolerance(dtype))
                      << name << " tensor " << t << " element " << i;
                }
                const std::lock_guard<std::mutex> lock(mutex);
                const auto [at, inserted] = first.try_emplace(name + "/" + std::to_string(t), out[t]);
                EXPECT_TRUE(inserted || at->second == out[t]) << name << ": ranks or calls have different bits";
              }
            }
          }
        }
      },
      options());
}

INSTANTIATE_TEST_SUITE_P(Topologies, AdaptiveSumTest, testing::Range(size_t{0}, Topologies().size()),
                         [](const auto& info) { return std::string(Topologies()[info.param].name); });

}  // namespace
}  // namespace ddl_test
