#include "kernels/views.h"

namespace ddl {

void ReduceAlone(const View& in, const View& out, const Reduction& reduction) {
  View::ForEachPair(in, out, 0, in.count(), [&](const void* from, void* to, uint64_t, uint64_t n) {
    Reduce(reduction.dtype, reduction.op, &from, 1, to, n, reduction.divisor, Store::kCached);
  });
}

void CopyView(const View& in, const View& out, Store store) {
  View::ForEachPair(in, out, 0, in.count(), [&](const char* from, char* to, uint64_t, uint64_t n) {
    if (from != to) Copy(to, from, n * in.element_bytes(), store);
  });
}

}  // namespace ddl
