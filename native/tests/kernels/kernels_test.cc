// Compares Reduce and Copy with the scalar oracle, bit by bit. CTest runs this program once per instruction set: each
// equals the oracle, so all are equal.
#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <tuple>

#include "kernels/oracle.h"
#include "test_data.h"

namespace ddl_test {
namespace {

using ddl::Store;

constexpr Store kStores[] = {Store::kCached, Store::kStreaming, Store::kRepMovsb};

// Returns where `a` and `b` first differ, for a message; -1 if they are equal.
long FirstDifference(const uint8_t* a, const uint8_t* b, size_t bytes, size_t element) {
  if (bytes == 0 || std::memcmp(a, b, bytes) == 0) return -1;
  size_t i = 0;
  while (a[i] == b[i]) ++i;
  return static_cast<long>(i / element);
}

class ReduceTest : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  ddl_dtype dtype() const { return static_cast<ddl_dtype>(std::get<0>(GetParam())); }
  ddl_op op() const { return static_cast<ddl_op>(std::get<1>(GetParam())); }
  size_t size() const { return ddl::DtypeSize(dtype()); }

  std::vector<std::vector<uint8_t>> Inputs(int n, size_t count) const {
    std::vector<std::vector<uint8_t>> inputs;
    for (int k = 0; k < n; ++k) inputs.push_back(RandomElements(dtype(), count, 100 + k));
    return inputs;
  }
};

std::vector<const void*> Pointers(const std::vector<std::vector<uint8_t>>& inputs) {
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data());
  return pointers;
}

TEST_P(ReduceTest, EqualsOracle) {
  const size_t large = kSanitized ? 10007 : 1000003;
  const auto inputs = Inputs(7, large);
  for (const int n : {1, 2, 3, 4, 7}) {
    std::vector<const void*> in = Pointers(inputs);
    in.resize(n);
    std::vector<uint8_t> expected(large * size());
    OracleReduce(dtype(), op(), in, large, n, expected.data());
    for (const size_t count : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{17}, large}) {
      for (const Store store : kStores) {
        std::vector<uint8_t> out(count * size());
        ddl::Reduce(dtype(), op(), in.data(), n, out.data(), count, n, store);
        ASSERT_EQ(FirstDifference(out.data(), expected.data(), out.size(), size()), -1)
            << "n " << n << ", count " << count << ", streaming " << (store == Store::kStreaming);
      }
    }
  }
}

TEST_P(ReduceTest, ManyInputsEqualOracle) {
  const size_t count = 9001;
  const auto inputs = Inputs(64, count);
  for (const int n : {8, 9, 12, 13, 64}) {
    std::vector<const void*> in = Pointers(inputs);
    in.resize(n);
    std::vector<uint8_t> expected(count * size());
    OracleReduce(dtype(), op(), in, count, n, expected.data());
    for (const Store store : kStores) {
      std::vector<uint8_t> out(count * size());
      ddl::Reduce(dtype(), op(), in.data(), n, out.data(), count, n, store);
      ASSERT_EQ(FirstDifference(out.data(), expected.data(), out.size(), size()), -1) << "n " << n;
    }
  }
}

TEST_P(ReduceTest, AnyAlignmentGivesTheSameBitsAndTouchesNothingElse) {
  const size_t most = 700;
  const auto inputs = Inputs(3, most);
  for (const int n : {2, 3}) {
    std::vector<uint8_t> expected(most * size());
    std::vector<const void*> aligned = Pointers(inputs);
    aligned.resize(n);
    OracleReduce(dtype(), op(), aligned, most, n, expected.data());
    Random random(n);
    for (int round = 0; round < (kSanitized ? 60 : 300); ++round) {
      const size_t count = random.Below(most + 1);
      std::vector<std::vector<uint8_t>> shifted;
      std::vector<const void*> in;
      for (int k = 0; k < n; ++k) {
        const size_t shift = random.Below(64);
        shifted.emplace_back(shift + count * size());
        if (count > 0) std::memcpy(shifted.back().data() + shift, inputs[k].data(), count * size());
        in.push_back(shifted.back().data() + shift);
      }
      const size_t shift = random.Below(130);
      std::vector<uint8_t> out(shift + count * size() + 130, 0xa5);
      ddl::Reduce(dtype(), op(), in.data(), n, out.data() + shift, count, n, kStores[round % 3]);
      ASSERT_EQ(FirstDifference(out.data() + shift, expected.data(), count * size(), size()), -1)
          << "shift " << shift << ", count " << count;
      for (size_t i = 0; i < shift; ++i) ASSERT_EQ(out[i], 0xa5);
      for (size_t i = shift + count * size(); i < out.size(); ++i) ASSERT_EQ(out[i], 0xa5);
    }
  }
}

TEST_P(ReduceTest, OutMayBeAnyInput) {
  const size_t count = 20011;
  for (const int n : {1, 2, 3, 11}) {
    const auto original = Inputs(n, count);
    std::vector<uint8_t> expected(count * size());
    OracleReduce(dtype(), op(), Pointers(original), count, n, expected.data());
    for (int k = 0; k < n; ++k) {
      for (const Store store : kStores) {
        auto inputs = original;
        ddl::Reduce(dtype(), op(), Pointers(inputs).data(), n, inputs[k].data(), count, n, store);
        ASSERT_EQ(FirstDifference(inputs[k].data(), expected.data(), expected.size(), size()), -1)
            << "n " << n << ", out is input " << k;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, ReduceTest,
                         testing::Combine(testing::Range(0, static_cast<int>(DDL_NUM_DTYPES)),
                                          testing::Range(0, ddl::kElementwiseOps)),
                         [](const auto& info) {
                           return std::string(ddl::DtypeName(static_cast<ddl_dtype>(std::get<0>(info.param)))) + "_" +
                                  ddl::OpName(static_cast<ddl_op>(std::get<1>(info.param)));
                         });

TEST(CopyTest, CopiesEveryLengthAndAlignment) {
  const auto source = RandomElements(DDL_UINT8, 5000, 1);
  Random random(2);
  for (int round = 0; round < 2000; ++round) {
    const size_t from = random.Below(70);
    const size_t to = random.Below(130);
    const size_t bytes = round < 1800 ? round / 3 : random.Below(4900);
    std::vector<uint8_t> out(to + bytes + 130, 0xa5);
    ddl::Copy(out.data() + to, source.data() + from, bytes, kStores[round % 3]);
    ASSERT_EQ(FirstDifference(out.data() + to, source.data() + from, bytes, 1), -1);
    for (size_t i = 0; i < to; ++i) ASSERT_EQ(out[i], 0xa5);
    for (size_t i = to + bytes; i < out.size(); ++i) ASSERT_EQ(out[i], 0xa5);
  }
}

TEST(InstructionSetTest, IsTheRequestedOne) {
  const char* const asked = std::getenv("KERAS_DDL_ISA");
  const std::string name = ddl::InstructionSetName();
  if (asked == nullptr || *asked == '\0') {
    EXPECT_TRUE(name == "AVX-512" || name == "AVX2" || name == "baseline") << name;
  } else if (std::string(asked) == "baseline") {
    EXPECT_EQ(name, "baseline");
  } else if (std::string(asked) == "avx2") {
    EXPECT_NE(name, "AVX-512");
  }
#if defined(__x86_64__)
  if (asked != nullptr && std::string(asked) == "avx512" && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    EXPECT_EQ(name, "AVX-512");
  }
  if (asked != nullptr && std::string(asked) == "avx2" && __builtin_cpu_supports("avx2")) {
    EXPECT_EQ(name, "AVX2");
  }
#endif
}

}  // namespace
}  // namespace ddl_test
