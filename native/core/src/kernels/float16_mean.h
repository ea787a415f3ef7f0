// Means of float16 across groups. A sum over many ranks may overflow although the mean does not, and groups send each
// other 16 bits. So each group divides its float32 sum by a power of two that is not below the number of ranks, which
// is exact except for subnormals. The rest of the division follows when the sum over the groups is known.
#ifndef KERAS_DDL_CORE_KERNELS_FLOAT16_MEAN_H_
#define KERAS_DDL_CORE_KERNELS_FLOAT16_MEAN_H_

#include "kernels/views.h"

namespace ddl {

// Returns the smallest power of two >= ranks.
double Float16Divisor(int ranks);

// Sets `out` to `sum` / last.divisor, like ReduceAlone, but keeps finite float16 values finite: sums that were rounded
// up may give a mean just beyond the largest float16, which is then the result. In such places it also changes `sum`.
void DivideLast(const View& sum, const View& out, const Reduction& last);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_FLOAT16_MEAN_H_
