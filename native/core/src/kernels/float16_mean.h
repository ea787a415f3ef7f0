// Means of float16 across groups. A sum over many ranks may overflow where the mean does not, and what travels between
// groups has 16 bits. So each group divides its sum, known in float32, by a power of two not below the number of ranks,
// which is exact but for subnormals; the rest of the division follows when the sum over the groups is known.
#ifndef KERAS_DDL_CORE_KERNELS_FLOAT16_MEAN_H_
#define KERAS_DDL_CORE_KERNELS_FLOAT16_MEAN_H_

#include "kernels/views.h"

namespace ddl {

// The smallest power of two >= ranks.
double Float16Divisor(int ranks);

// `out` = `sum` / last.divisor, as ReduceAlone does it. A finite float16 stays finite: sums rounded up on their way may
// stand for a mean just beyond the largest float16, which is then the nearest there is. Changes `sum` where it does so.
void DivideLast(const View& sum, const View& out, const Reduction& last);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_FLOAT16_MEAN_H_
