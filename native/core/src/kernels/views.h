// Runs the kernels on complete views, piece by piece.
#ifndef KERAS_DDL_CORE_KERNELS_VIEWS_H_
#define KERAS_DDL_CORE_KERNELS_VIEWS_H_

#include "base/view.h"
#include "ddl.h"
#include "kernels/kernels.h"

namespace ddl {

// The parameters of a reduction; `divisor` is only used for DDL_MEAN.
struct Reduction {
  ddl_dtype dtype;
  ddl_op op;
  double divisor;
};

// For a group of one rank: writes the reduction of this rank's `in` alone to `out` (a mean still divides).
void ReduceAlone(const View& in, const View& out, const Reduction& reduction);

// Copies `in` to `out`, piece by piece; skips pieces that are already in place.
void CopyView(const View& in, const View& out, Store store);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_VIEWS_H_
