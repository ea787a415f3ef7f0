// Edge cases in which a kernel that is right on ordinary numbers can fail.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "common/half.h"
#include "kernels/kernels.h"
#include "kernels/oracle.h"
#include "test_data.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ddl_test {
namespace {

using ddl::Store;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <typename T>
std::vector<T> ReduceVectors(ddl_dtype dtype, ddl_op op, const std::vector<std::vector<T>>& inputs,
                             double divisor = 1) {
  std::vector<const void*> in;
  for (const auto& input : inputs) in.push_back(input.data());
  std::vector<T> out(inputs[0].size());
  ddl::Reduce(dtype, op, in.data(), static_cast<int>(in.size()), out.data(), out.size(), divisor, Store::kCached);
  return out;
}

std::vector<uint16_t> AllHalves() {
  std::vector<uint16_t> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = static_cast<uint16_t>(i);
  return all;
}

TEST(Float16Test, EveryValueSurvivesAddingNegativeZero) {
  const std::vector<uint16_t> out =
      ReduceVectors<uint16_t>(DDL_FLOAT16, DDL_SUM, {AllHalves(), std::vector<uint16_t>(65536, 0x8000)});
  for (int i = 0; i < 65536; ++i) {
    const bool nan = (i & 0x7c00) == 0x7c00 && (i & 0x3ff) != 0;
    ASSERT_EQ(out[i], nan ? 0x7e00 : i);
  }
}

TEST(Bfloat16Test, EveryValueSurvivesAddingNegativeZero) {
  const std::vector<uint16_t> out =
      ReduceVectors<uint16_t>(DDL_BFLOAT16, DDL_SUM, {AllHalves(), std::vector<uint16_t>(65536, 0x8000)});
  for (int i = 0; i < 65536; ++i) {
    const bool nan = (i & 0x7f80) == 0x7f80 && (i & 0x7f) != 0;
    ASSERT_EQ(out[i], nan ? 0x7fc0 : i);
  }
}

// Halving every value rounds every subnormal both ways.
TEST(Float16Test, HalvingEveryValueRoundsToNearestEven) {
  for (const ddl_dtype dtype : {DDL_FLOAT16, DDL_BFLOAT16}) {
    const HalfFormat format = dtype == DDL_FLOAT16 ? kFloat16 : kBfloat16;
    const std::vector<uint16_t> all = AllHalves();
    const std::vector<uint16_t> out = ReduceVectors<uint16_t>(dtype, DDL_MEAN, {all}, 2);
    for (int i = 0; i < 65536; ++i) ASSERT_EQ(out[i], EncodeHalf(format, DecodeHalf(format, all[i]) / 2)) << i;
  }
}

TEST(Float16Test, SumsOnceRoundedNotTwice) {
  // 2048 + 1 + 1: a float16 partial sum loses each 1; a float32 partial sum gives 2050.
  const uint16_t big = EncodeHalf(kFloat16, 2048), one = EncodeHalf(kFloat16, 1);
  EXPECT_EQ(ReduceVectors<uint16_t>(DDL_FLOAT16, DDL_SUM, {{big}, {one}, {one}})[0], EncodeHalf(kFloat16, 2050));
}

TEST(Float16Test, MeanDoesNotOverflowWhenItsSumWould) {
  const uint16_t big = EncodeHalf(kFloat16, 60000);
  EXPECT_EQ(ReduceVectors<uint16_t>(DDL_FLOAT16, DDL_MEAN, {{big}, {big}, {big}}, 3)[0], big);
  EXPECT_EQ(ReduceVectors<uint16_t>(DDL_FLOAT16, DDL_MEAN, {{big}, {big}}, 2)[0], big);
  EXPECT_EQ(ReduceVectors<uint16_t>(DDL_FLOAT16, DDL_SUM, {{big}, {big}})[0], 0x7c00);
}

TEST(Float16Test, OverflowBeginsHalfAUnitAboveTheLargest) {
  const uint16_t largest = 0x7bff;  // 65504; 65520 is the tie and goes to infinity
  const uint16_t below = EncodeHalf(kFloat16, 15.5), tie = EncodeHalf(kFloat16, 16);
  const auto out = ReduceVectors<uint16_t>(DDL_FLOAT16, DDL_SUM, {{largest, largest}, {below, tie}});
  EXPECT_EQ(out[0], largest);
  EXPECT_EQ(out[1], 0x7c00);
}

TEST(HalfTest, ScalarConversionsAgreeWithTheFormats) {
  for (int i = 0; i < 65536; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    const std::pair<double, double> pairs[] = {{ddl::Float16{bits}.ToFloat(), DecodeHalf(kFloat16, bits)},
                                               {ddl::Bfloat16{bits}.ToFloat(), DecodeHalf(kBfloat16, bits)}};
    for (const auto& [received, expected] : pairs) {
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(received));
      } else {
        ASSERT_EQ(received, expected);
        ASSERT_EQ(std::signbit(received), std::signbit(expected));
      }
    }
  }
}

template <typename Half>
void CheckFromFloat(HalfFormat format, float value) {
  const Half received = Half::FromFloat(value);
  if (std::isnan(value)) {
    ASSERT_TRUE(std::isnan(received.ToFloat()));
  } else {
    ASSERT_EQ(received.bits, EncodeHalf(format, static_cast<double>(value))) << value;
  }
}

TEST(HalfTest, ScalarsAreRoundedToNearestEven) {
  for (uint32_t i = 0; i < 65536; ++i) {
    // Each 16-bit number, the value halfway to the next one, and the values just beside that.
    for (const uint32_t beside : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = i << 16 | beside;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      CheckFromFloat<ddl::Bfloat16>(kBfloat16, value);
      CheckFromFloat<ddl::Float16>(kFloat16, value);
    }
    const auto half = static_cast<float>(DecodeHalf(kFloat16, static_cast<uint16_t>(i)));
    const auto next = static_cast<float>(DecodeHalf(kFloat16, static_cast<uint16_t>(i + 1)));
    const float middle = (half + next) / 2;
    for (const float value : {half, middle, std::nextafter(middle, half), std::nextafter(middle, next)}) {
      CheckFromFloat<ddl::Float16>(kFloat16, value);
    }
  }
}

TEST(MeanTest, DividesRatherThanMultipliesByTheReciprocal) {
  std::vector<float> values(1000);
  for (int i = 0; i < 1000; ++i) values[i] = static_cast<float>(i) + 1;
  for (const int divisor : {3, 5, 7, 10, 2, 4, 64, 1}) {
    const auto out = ReduceVectors<float>(DDL_FLOAT32, DDL_MEAN, {values}, divisor);
    for (int i = 0; i < 1000; ++i) ASSERT_EQ(out[i], values[i] / static_cast<float>(divisor));
  }
}

TEST(NanTest, ReachesTheResultFromAnyPosition) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ddl_op op : {DDL_SUM, DDL_MEAN, DDL_MIN, DDL_MAX, DDL_PRODUCT}) {
    for (int k = 0; k < 3; ++k) {
      std::vector<std::vector<float>> inputs(3, std::vector<float>(33, 1.0f));
      inputs[k].assign(33, nan);
      for (const float value : ReduceVectors<float>(DDL_FLOAT32, op, inputs, 3)) ASSERT_TRUE(std::isnan(value)) << op;
    }
  }
}

TEST(NanTest, InfinityMinusInfinityIsTheSameNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto out = ReduceVectors<float>(DDL_FLOAT32, DDL_SUM, {{infinity, 1}, {-infinity, infinity}});
  uint32_t bits;
  std::memcpy(&bits, &out[0], sizeof bits);
  EXPECT_EQ(bits, 0x7fc00000u);
  EXPECT_EQ(out[1], infinity);
}

TEST(IntegerTest, SumsAndProductsWrap) {
  EXPECT_EQ(ReduceVectors<int32_t>(DDL_INT32, DDL_SUM, {{INT32_MAX}, {1}})[0], INT32_MIN);
  EXPECT_EQ(ReduceVectors<int64_t>(DDL_INT64, DDL_SUM, {{INT64_MAX}, {1}})[0], INT64_MIN);
  EXPECT_EQ(ReduceVectors<int8_t>(DDL_INT8, DDL_SUM, {{127}, {1}})[0], -128);
  EXPECT_EQ(ReduceVectors<uint8_t>(DDL_UINT8, DDL_SUM, {{255}, {1}})[0], 0);
  EXPECT_EQ(ReduceVectors<int8_t>(DDL_INT8, DDL_PRODUCT, {{-128}, {-1}})[0], -128);
  EXPECT_EQ(ReduceVectors<int8_t>(DDL_INT8, DDL_MIN, {{-128}, {127}})[0], -128);
  EXPECT_EQ(ReduceVectors<uint8_t>(DDL_UINT8, DDL_MAX, {{128}, {127}})[0], 128);
}

template <typename T>
void CheckIntegerMean(ddl_dtype dtype, const std::vector<T>& values) {
  std::vector<int64_t> wide(values.size());
  if (dtype == DDL_INT64) {
    for (size_t i = 0; i < values.size(); ++i) wide[i] = static_cast<int64_t>(values[i]);
  } else {
    ddl::WidenToInt64(dtype, values.data(), wide.data(), wide.size());
  }
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(wide[i], static_cast<int64_t>(values[i]));
  for (const int64_t divisor : {1, 2, 3, 7}) {
    std::vector<T> out(values.size());
    ddl::DivideFromInt64(dtype, wide.data(), out.data(), out.size(), divisor);
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(out[i], static_cast<T>(wide[i] / divisor));
  }
}

TEST(IntegerTest, MeansRoundTowardZero) {
  CheckIntegerMean<int32_t>(DDL_INT32, {0, 1, -1, 5, -5, INT32_MAX, INT32_MIN});
  CheckIntegerMean<int64_t>(DDL_INT64, {0, 1, -1, 5, -5, INT64_MAX, INT64_MIN});
  CheckIntegerMean<int8_t>(DDL_INT8, {0, 1, -1, 5, -5, 127, -128});
  CheckIntegerMean<uint8_t>(DDL_UINT8, {0, 1, 5, 254, 255});
  std::vector<int64_t> in_place{-7, 7};
  ddl::DivideFromInt64(DDL_INT64, in_place.data(), in_place.data(), 2, 2);
  EXPECT_EQ(in_place, (std::vector<int64_t>{-3, 3}));
}

#if defined(__x86_64__) || defined(__aarch64__)
#if defined(__x86_64__)
constexpr uint64_t kUnusualFloatMode = 0x8040 | 0x6000;  // flush to zero, subnormals are zero; round toward zero
uint64_t FloatMode() { return _mm_getcsr(); }
void SetFloatMode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#else
constexpr uint64_t kUnusualFloatMode = 3u << 22 | 1u << 24 | 1u << 19;  // round toward zero; flush, 16 bits too
uint64_t FloatMode() {
  uint64_t mode = 0;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void SetFloatMode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#endif

// As on a thread started by a library that was built with -ffast-math.
template <typename T>
T SumInAnUnusualFloatMode(ddl_dtype dtype, T a, T b) {
  const std::vector<std::vector<T>> inputs = {{a}, {b}};
  const uint64_t before = FloatMode();
  SetFloatMode(before | kUnusualFloatMode);
  const std::vector<T> out = ReduceVectors<T>(dtype, DDL_SUM, inputs);
  const uint64_t after = FloatMode();
  SetFloatMode(before);
  EXPECT_EQ(after & kUnusualFloatMode, kUnusualFloatMode) << "the thread's own mode comes back";
  return out[0];
}

TEST(FloatModeTest, SubnormalsSurviveAThreadThatFlushesThem) {
  EXPECT_EQ(SumInAnUnusualFloatMode<float>(DDL_FLOAT32, 0x1p-140f, 0x1p-140f), 0x1p-139f);
  EXPECT_EQ(SumInAnUnusualFloatMode<double>(DDL_FLOAT64, 0x1p-1060, 0x1p-1060), 0x1p-1059);
  EXPECT_EQ(SumInAnUnusualFloatMode<uint16_t>(DDL_FLOAT16, 3, 4), 7);
  EXPECT_EQ(SumInAnUnusualFloatMode<uint16_t>(DDL_BFLOAT16, 3, 4), 7);
}

TEST(FloatModeTest, RoundsToNearestOnAThreadThatDoesNot) {
  EXPECT_EQ(SumInAnUnusualFloatMode<float>(DDL_FLOAT32, 1, 0x1.8p-24f), 1 + 0x1p-23f);
  EXPECT_EQ(SumInAnUnusualFloatMode<double>(DDL_FLOAT64, 1, 0x1.8p-53), 1 + 0x1p-52);
}
#endif

double DifferenceOf(double a, double b) { return ddl::MaxRelativeDifference(DDL_FLOAT64, &a, &b, 1); }

TEST(MaxRelativeDifferenceTest, IsAbsoluteBelowOneAndRelativeAbove) {
  EXPECT_EQ(DifferenceOf(0.5, 0.25), 0.25);
  EXPECT_EQ(DifferenceOf(110, 100), 0.1);
  EXPECT_EQ(DifferenceOf(-110, -100), 0.1);
  EXPECT_EQ(ddl::MaxRelativeDifference(DDL_FLOAT32, nullptr, nullptr, 0), 0);
}

TEST(MaxRelativeDifferenceTest, SpecialValues) {
  EXPECT_EQ(DifferenceOf(kInfinity, kInfinity), 0);
  EXPECT_EQ(DifferenceOf(kNan, kNan), 0);
  EXPECT_EQ(DifferenceOf(-0.0, 0.0), 0);
  EXPECT_EQ(DifferenceOf(kInfinity, -kInfinity), kInfinity);
  EXPECT_EQ(DifferenceOf(1, kInfinity), kInfinity);
  EXPECT_EQ(DifferenceOf(kInfinity, 1), kInfinity);
  EXPECT_EQ(DifferenceOf(kNan, 1), kInfinity);
  EXPECT_EQ(DifferenceOf(1, kNan), kInfinity);
  EXPECT_EQ(DifferenceOf(kNan, kInfinity), kInfinity);
  const double largest = std::numeric_limits<double>::max();
  EXPECT_EQ(DifferenceOf(largest, -largest), 2);
}

TEST(MaxRelativeDifferenceTest, FindsTheLargestOfEveryDtype) {
  const uint16_t half_a[3] = {EncodeHalf(kFloat16, 1), EncodeHalf(kFloat16, 3), EncodeHalf(kFloat16, 1)};
  const uint16_t half_b[3] = {EncodeHalf(kFloat16, 1), EncodeHalf(kFloat16, 2), EncodeHalf(kFloat16, 1.25)};
  EXPECT_EQ(ddl::MaxRelativeDifference(DDL_FLOAT16, half_a, half_b, 3), 0.5);
  const uint16_t brain_a[2] = {EncodeHalf(kBfloat16, 1), EncodeHalf(kBfloat16, 3)};
  const uint16_t brain_b[2] = {EncodeHalf(kBfloat16, 1), EncodeHalf(kBfloat16, 4)};
  EXPECT_EQ(ddl::MaxRelativeDifference(DDL_BFLOAT16, brain_a, brain_b, 2), 0.25);
  const int64_t long_a[2] = {INT64_MAX, 5}, long_b[2] = {INT64_MIN, 5};
  EXPECT_EQ(ddl::MaxRelativeDifference(DDL_INT64, long_a, long_b, 2), 2);
  const int64_t near_a = (int64_t{1} << 53) + 1, near_b = int64_t{1} << 53;  // equal as doubles
  EXPECT_GT(ddl::MaxRelativeDifference(DDL_INT64, &near_a, &near_b, 1), 0);
  const uint8_t byte_a[2] = {255, 4}, byte_b[2] = {255, 2};
  EXPECT_EQ(ddl::MaxRelativeDifference(DDL_UINT8, byte_a, byte_b, 2), 1);
  const int8_t signed_a[2] = {-1, -4}, signed_b[2] = {-1, -8};
  EXPECT_EQ(ddl::MaxRelativeDifference(DDL_INT8, signed_a, signed_b, 2), 0.5);
  const int32_t int_a[2] = {7, 8}, int_b[2] = {7, 7};
  EXPECT_EQ(ddl::MaxRelativeDifference(DDL_INT32, int_a, int_b, 2), 1.0 / 7);
  const float float_a[2] = {1, 2.5f}, float_b[2] = {1, 2};
  EXPECT_EQ(ddl::MaxRelativeDifference(DDL_FLOAT32, float_a, float_b, 2), 0.25);
}

TEST(NeutralTest, ChangesNoReduction) {
  constexpr size_t kCount = 1000;
  for (int d = 0; d < DDL_NUM_DTYPES; ++d) {
    const auto dtype = static_cast<ddl_dtype>(d);
    for (int o = 0; o < ddl::kElementwiseOps; ++o) {
      const auto op = static_cast<ddl_op>(o);
      if (op == DDL_MEAN && !ddl::IsFloating(dtype)) continue;  // a mean is computed from a sum
      const std::vector<uint8_t> values =
          RandomElements(dtype, kCount, static_cast<uint64_t>(d * ddl::kElementwiseOps + o));
      std::vector<uint8_t> neutral(values.size());
      std::vector<uint8_t> result(values.size());
      ddl::FillNeutral(dtype, op, neutral.data(), kCount);
      const void* const sources[] = {values.data(), neutral.data()};
      ddl::Reduce(dtype, op, sources, 2, result.data(), kCount, 1.0, ddl::Store::kCached);
      EXPECT_EQ(ddl::MaxRelativeDifference(dtype, result.data(), values.data(), kCount), 0) << d << " " << o;
    }
  }
}

TEST(NamesTest, EqualThoseOfThePythonLayer) {
  EXPECT_STREQ(ddl::DtypeName(DDL_BFLOAT16), "bfloat16");
  EXPECT_STREQ(ddl::OpName(DDL_MEAN), "mean");
  EXPECT_STREQ(ddl::KindName(DDL_REDUCE_SCATTER), "reduce_scatter");
  for (int d = 0; d < DDL_NUM_DTYPES; ++d) {
    const std::string name = ddl::DtypeName(static_cast<ddl_dtype>(d));
    const size_t digits = name.find_first_of("0123456789");
    EXPECT_EQ(ddl::DtypeSize(static_cast<ddl_dtype>(d)) * 8, std::stoul(name.substr(digits)));
  }
}

}  // namespace
}  // namespace ddl_test
