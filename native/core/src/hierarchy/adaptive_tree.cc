#include "hierarchy/adaptive_tree.h"

#include <algorithm>
#include <utility>

#include "common/dtypes.h"
#include "kernels/adaptive_sum.h"

namespace ddl {

std::vector<TensorPart> TensorPartsOf(const std::vector<uint64_t>& tensors, const Range& piece) {
  std::vector<TensorPart> parts;
  uint64_t begin = 0;
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const uint64_t end = begin + tensors[tensor];
    const Range both{std::max(begin, piece.begin), std::min(end, piece.end)};
    if (both.begin < both.end) parts.push_back({tensor, {both.begin - piece.begin, both.end - piece.begin}});
    begin = end;
  }
  return parts;
}

Status CombineTree(ddl_dtype wide, std::vector<char*> vectors, const char* kept, const std::vector<TensorPart>& parts,
                   size_t num_tensors, BoxNumber box, const std::function<Status(const View& numbers)>& add,
                   char** result) {
  const size_t bytes = DtypeSize(wide);
  while (vectors.size() > 1) {
    const size_t pairs = vectors.size() / 2;
    std::vector<Dots> dots(box.count * pairs * num_tensors);
    Dots* const own = dots.data() + box.index * pairs * num_tensors;
    for (size_t p = 0; p < pairs; ++p) {
      for (const TensorPart& part : parts) {
        AddDots(wide, vectors[2 * p] + part.range.begin * bytes, vectors[2 * p + 1] + part.range.begin * bytes,
                part.range.size(), &own[p * num_tensors + part.tensor]);
      }
    }
    static_assert(sizeof(Dots) == 3 * sizeof(double));
    DDL_RETURN_IF_ERROR(add(View(sizeof(double), dots.data(), 3 * dots.size())));
    std::vector<char*> results;
    for (size_t p = 0; p < pairs; ++p) {
      // The sum of two products does not depend on their order.
      const bool swapped = kept != nullptr && vectors[2 * p] == kept;
      char* const into = vectors[2 * p + (swapped ? 1 : 0)];
      const char* const other = vectors[2 * p + (swapped ? 0 : 1)];
      for (const TensorPart& part : parts) {
        Dots products = own[p * num_tensors + part.tensor];
        if (swapped) std::swap(products.aa, products.bb);
        Combine(wide, into + part.range.begin * bytes, other + part.range.begin * bytes, part.range.size(), products);
      }
      results.push_back(into);
    }
    if (vectors.size() % 2 != 0) results.push_back(vectors.back());
    vectors = std::move(results);
  }
  *result = vectors[0];
  return {};
}

}  // namespace ddl
