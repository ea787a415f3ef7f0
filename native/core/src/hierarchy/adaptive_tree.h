// The tree of an adaptive sum (kernels/adaptive_sum.h) on the piece of the vectors that a rank has: vectors are
// combined in pairs, 0 with 1, 2 with 3 and so on, then the results in the same way; one without a neighbour goes on as
// it is.
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

// The elements of tensor `tensor` in a piece, counted from the piece's begin. Of each tensor one at most.
struct TensorPart {
  size_t tensor;
  Range range;
};
std::vector<TensorPart> TensorPartsOf(const std::vector<uint64_t>& tensors, const Range& piece);

// Of `count` boxes of ranks that all combine vectors of their own at the same time, this rank is in number `index`.
struct BoxNumber {
  size_t index = 0;
  size_t count = 1;
};

// Combines `vectors`, which are pieces of so many `wide` elements as `parts` say; *result: the one that has become the
// result. The others are changed too, all but `kept` (or null), which is only read; there are at least two then. `add`
// sums float64 numbers over the ranks of all boxes, which make the vectors whole, in place.
// Cost: log2(vectors) calls of `add`, the first of 3 * boxes * vectors / 2 * tensors numbers; each vector is read
// twice.
Status CombineTree(ddl_dtype wide, std::vector<char*> vectors, const char* kept, const std::vector<TensorPart>& parts,
                   size_t num_tensors, BoxNumber box, const std::function<Status(const View& numbers)>& add,
                   char** result);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_HIERARCHY_ADAPTIVE_TREE_H_
