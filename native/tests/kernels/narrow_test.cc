// Compares the conversions between float32 and 16 bits of every instruction set with the scalars of common/half.h.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "common/half.h"
#include "kernels/kernels.h"
#include "test_data.h"

namespace ddl_test {
namespace {

uint16_t Narrowed(ddl_dtype to, float value) {
  if (std::isnan(value)) value = __builtin_nanf("");
  return to == DDL_FLOAT16 ? ddl::Float16::FromFloat(value).bits : ddl::Bfloat16::FromFloat(value).bits;
}

float Widened(ddl_dtype from, uint16_t bits) {
  return from == DDL_FLOAT16 ? ddl::Float16{bits}.ToFloat() : ddl::Bfloat16{bits}.ToFloat();
}

bool Same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

TEST(Narrow, RoundsAsTheScalarsDo) {
  for (const size_t count : {0u, 1u, 3u, 15u, 16u, 17u, 100u, 4097u}) {
    const std::vector<uint8_t> bytes = RandomElements(DDL_FLOAT32, count, 3 + count);
    std::vector<float> in(count + 1);
    if (count > 0) std::memcpy(in.data(), bytes.data(), bytes.size());
    for (const ddl_dtype to : {DDL_BFLOAT16, DDL_FLOAT16}) {
      for (const float scale : {1.0f, 0x1p13f, 0x1p-5f}) {
        std::vector<uint16_t> out(count + 1, 0xa5a5);
        std::vector<float> error(count + 1, -7);
        ddl::Narrow(to, in.data(), scale, out.data(), 3, error.data(), count);
        std::vector<uint16_t> alone(count + 1, 0xa5a5);
        ddl::Narrow(to, in.data(), scale, alone.data(), 3, nullptr, count);
        ASSERT_EQ(out, alone);
        ASSERT_EQ(out[count], 0xa5a5) << "wrote beyond the end";
        ASSERT_EQ(error[count], -7) << "wrote beyond the end";
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(out[i], Narrowed(to, in[i] * scale)) << in[i] << " times " << scale;
          const float lost = (in[i] - Widened(to, out[i]) * (1 / scale)) * 3;
          ASSERT_TRUE(Same(error[i], std::isfinite(lost) ? lost : 0.0f)) << in[i];
        }
      }
    }
  }
}

TEST(Widen, IsExact) {
  std::vector<uint16_t> in(65536);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
  for (const ddl_dtype from : {DDL_BFLOAT16, DDL_FLOAT16}) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{37}, in.size()}) {
      std::vector<float> out(count + 1, -7), sum(count + 1, 1.5f);
      ddl::Widen(from, in.data(), 0x1p-3f, out.data(), count, false);
      ddl::Widen(from, in.data(), 0x1p-3f, sum.data(), count, true);
      ASSERT_EQ(out[count], -7) << "wrote beyond the end";
      for (size_t i = 0; i < count; ++i) {
        const float value = Widened(from, in[i]) * 0x1p-3f;
        ASSERT_TRUE(Same(out[i], value)) << i;
        ASSERT_TRUE(Same(sum[i], value + 1.5f)) << i;
      }
    }
  }
}

TEST(LargestFinite, SkipsInfinityAndNan) {
  std::vector<float> in(41, -0.5f);
  EXPECT_EQ(ddl::LargestFinite(in.data(), in.size()), 0.5f);
  in[3] = INFINITY;
  in[40] = -7;
  in[11] = NAN;
  EXPECT_EQ(ddl::LargestFinite(in.data(), in.size()), 7.0f);
  EXPECT_EQ(ddl::LargestFinite(in.data(), 40), 0.5f);
  EXPECT_EQ(ddl::LargestFinite(in.data(), 0), 0.0f);
  EXPECT_EQ(ddl::LargestFinite(in.data() + 3, 1), 0.0f);
}

}  // namespace
}  // namespace ddl_test
