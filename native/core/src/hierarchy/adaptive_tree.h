// The tree of an adaptive sum (kernels/adaptive_sum.h) on a rank's piece of the vectors. Vectors are combined in pairs,
// 0 with 1, 2 with 3 and so on, then the results in the same way. A vector without a neighbour passes to the next
// level.
#ifndef KERAS_DDL_CORE_HIERARCHY_ADAPTIVE_TREE_H_
#define KERAS_DDL_CORE_HIERARCHY_ADAPTIVE_TREE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "base/range.h"
#include "base/status.h"
#include "base/view.h"
#include "ddl.h"

namespace ddl {

// The elements of tensor `tensor` in a piece, counted from the beginning of the piece. At most one part per tensor.
struct TensorPart {
  size_t tensor;
  Range range;
};
std::vector<TensorPart> TensorPartsOf(const std::vector<uint64_t>& tensors, const Range& piece);

// This rank's box: number `index` of `count` boxes of ranks, which all combine their own vectors at the same time.
struct BoxNumber {
  size_t index = 0;
  size_t count = 1;
};

// Combines `vectors`, which are pieces with the `wide` elements of `parts`. *result: the vector that has become the
// result. All other vectors are changed, too, except `kept` (or null), which is only read; with `kept` there are at
// least two vectors. `add` sums float64 numbers in place over the ranks of all boxes, which together have complete
// vectors. Cost: log2(vectors) calls of `add`, the first with 3 * boxes * vectors / 2 * tensors numbers; each vector is
// read twice.
Status CombineTree(ddl_dtype wide, std::vector<char*> vectors, const char* kept, const std::vector<TensorPart>& parts,
                   size_t num_tensors, BoxNumber box, const std::function<Status(const View& numbers)>& add,
                   char** result);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_HIERARCHY_ADAPTIVE_TREE_H_
