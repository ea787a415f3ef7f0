// View: several pieces of memory seen as one array of elements, so that N tensors are reduced in one operation without
// being copied into one buffer.
#ifndef KERAS_DDL_CORE_BASE_VIEW_H_
#define KERAS_DDL_CORE_BASE_VIEW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddl {

class View {
 public:
  explicit View(size_t element_bytes) : element_bytes_(element_bytes) {}
  View(size_t element_bytes, const void* data, uint64_t count) : View(element_bytes) { Add(data, count); }

  // Appends `count` elements at `data`. A view of inputs is only ever read, hence the cast.
  void Add(const void* data, uint64_t count) {
    if (count == 0) return;
    pieces_.push_back({static_cast<char*>(const_cast<void*>(data)), count_, count});
    count_ += count;
  }
  // Appends elements [offset, offset + count) of `other`.
  void Add(const View& other, uint64_t offset, uint64_t count) {
    other.ForEach(offset, count, [this](char* data, uint64_t, uint64_t n) { Add(data, n); });
  }
  View Slice(uint64_t offset, uint64_t count) const {
    View slice(element_bytes_);
    slice.Add(*this, offset, count);
    return slice;
  }

  uint64_t count() const { return count_; }
  size_t element_bytes() const { return element_bytes_; }
  uint64_t bytes() const { return count_ * element_bytes_; }

  // Calls f(pointer, offset from `offset`, elements) for each contiguous run of [offset, offset + count).
  // Cost: binary search plus the runs.
  template <typename F>
  void ForEach(uint64_t offset, uint64_t count, F f) const {
    if (count == 0) return;
    auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), offset,
                                  [](uint64_t at, const Piece& p) { return at < p.start; }) -
                 1;
    for (uint64_t at = offset; at < offset + count; ++piece) {
      const uint64_t skip = at - piece->start;
      const uint64_t n = std::min(piece->count - skip, offset + count - at);
      f(piece->data + skip * element_bytes_, at - offset, n);
      at += n;
    }
  }

  // Walks two views of equal length together: f(pointer in a, pointer in b, offset from `offset`, elements).
  template <typename F>
  static void ForEachPair(const View& a, const View& b, uint64_t offset, uint64_t count, F f) {
    a.ForEach(offset, count, [&](char* in_a, uint64_t from, uint64_t n) {
      b.ForEach(offset + from, n, [&](char* in_b, uint64_t inner, uint64_t m) {
        f(in_a + inner * a.element_bytes_, in_b, from + inner, m);
      });
    });
  }

 private:
  struct Piece {
    char* data;
    uint64_t start;
    uint64_t count;
  };
  size_t element_bytes_;
  uint64_t count_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_VIEW_H_
