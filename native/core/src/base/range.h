// Range: a contiguous range of an array's elements.
#ifndef KERAS_DDL_CORE_BASE_RANGE_H_
#define KERAS_DDL_CORE_BASE_RANGE_H_

#include <cstdint>
#include <vector>

namespace ddl {

// Elements [begin, end) of an array.
struct Range {
  uint64_t begin;
  uint64_t end;
  uint64_t size() const { return end - begin; }
};

// `count` elements cut into `parts` ranges whose sizes differ by at most one, the larger ones first.
inline std::vector<Range> SplitEvenly(uint64_t count, int parts) {
  const auto n = static_cast<uint64_t>(parts);
  std::vector<Range> ranges;
  uint64_t begin = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t end = begin + count / n + (i < count % n ? 1 : 0);
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_RANGE_H_
