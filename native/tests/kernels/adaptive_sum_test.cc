// Compares the kernels of adaptive sums with plain loops.
#include "kernels/adaptive_sum.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "common/half.h"
#include "kernels/kernels.h"
#include "test_data.h"

namespace ddl_test {
namespace {

// Sums in the order that the header promises everywhere: eight partial sums, then these from first to last.
template <typename T>
double DotOf(const T* a, const T* b, size_t count) {
  double sums[8] = {};
  for (size_t i = 0; i < count; ++i) sums[i % 8] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  double sum = 0;
  for (const double each : sums) sum += each;
  return sum;
}

template <typename T>
void ExpectCombines(ddl_dtype dtype) {
  Random random(3);
  const auto number = [&] { return static_cast<T>(static_cast<double>(random.Below(2'000'001)) * 1e-6 - 1); };
  for (const size_t count : {0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 1000, 4099}) {
    for (const size_t shift : {0, 1, 3}) {  // in elements; in bytes below
      std::vector<T> a(count), b(count);
      for (size_t i = 0; i < count; ++i) a[i] = number(), b[i] = number();
      std::vector<char> memory(2 * (count + 8) * sizeof(T) + 2, 0x5a);
      char* const x = memory.data() + 1 + shift * sizeof(T);
      char* const y = x + (count + 1) * sizeof(T);
      if (count > 0) std::memcpy(x, a.data(), count * sizeof(T)), std::memcpy(y, b.data(), count * sizeof(T));

      ddl::Dots dots{1, 2, 4};
      ddl::AddDots(dtype, x, y, count, &dots);
      EXPECT_EQ(dots.ab, 1 + DotOf(a.data(), b.data(), count)) << count;
      EXPECT_EQ(dots.aa, 2 + DotOf(a.data(), a.data(), count)) << count;
      EXPECT_EQ(dots.bb, 4 + DotOf(b.data(), b.data(), count)) << count;

      ddl::Combine(dtype, x, y, count, {3, 2, 0});
      for (size_t i = 0; i < count; ++i) {
        T result;
        std::memcpy(&result, x + i * sizeof(T), sizeof(T));
        EXPECT_EQ(result, static_cast<T>(0.25) * a[i] + b[i]) << count << " " << i;
      }
      for (char* at = x + count * sizeof(T); at < y; ++at) EXPECT_EQ(*at, 0x5a);
    }
  }
}

TEST(AdaptiveSumTest, OfFloat32) { ExpectCombines<float>(DDL_FLOAT32); }
TEST(AdaptiveSumTest, OfFloat64) { ExpectCombines<double>(DDL_FLOAT64); }

}  // namespace
}  // namespace ddl_test
