#include "kernels/float16_mean.h"

#include <cstring>

#include "common/half.h"

namespace ddl {
namespace {

constexpr uint16_t kInfinity = 0x7c00;
constexpr uint16_t kSign = 0x8000;
// Rounds to infinity, because it is halfway between the largest float16 and the next number that float16 would have.
constexpr float kOverflow = 65520.0f;

}  // namespace

double Float16Divisor(int ranks) {
  double divisor = 1;
  while (divisor < ranks) divisor *= 2;
  return divisor;
}

void DivideLast(const View& sum, const View& out, const Reduction& last) {
  if (last.dtype == DDL_FLOAT16 && last.divisor < 1) {
    // The bits of positive numbers have the same order as the numbers.
    uint16_t largest = kInfinity - 1;
    while (Float16{largest}.ToFloat() / static_cast<float>(last.divisor) >= kOverflow) --largest;
    sum.ForEach(0, sum.count(), [largest](char* data, uint64_t, uint64_t n) {
      for (uint64_t i = 0; i < n; ++i) {
        uint16_t bits;
        std::memcpy(&bits, data + 2 * i, sizeof bits);
        const auto magnitude = static_cast<uint16_t>(bits & ~kSign);
        const bool beyond = magnitude > largest && magnitude < kInfinity;
        bits = beyond ? static_cast<uint16_t>((bits & kSign) | largest) : bits;
        std::memcpy(data + 2 * i, &bits, sizeof bits);
      }
    });
  }
  ReduceAlone(sum, out, last);
}

}  // namespace ddl
