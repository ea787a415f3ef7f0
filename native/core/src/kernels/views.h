// The kernels on whole views, piece by piece.
#ifndef KERAS_DDL_CORE_KERNELS_VIEWS_H_
#define KERAS_DDL_CORE_KERNELS_VIEWS_H_

#include "base/view.h"
#include "ddl.h"
#include "kernels/kernels.h"

namespace ddl {

// How a reduction is to be done; `divisor` is read for DDL_MEAN only.
struct Reduction {
  ddl_dtype dtype;
  ddl_op op;
  double divisor;
};

// A group of one: `out` is the reduction of this rank's `in` alone (a mean still divides).
void ReduceAlone(const View& in, const View& out, const Reduction& reduction);

// Copies `in` to `out`, piece by piece; a piece that is its own destination is left alone.
void CopyView(const View& in, const View& out, Store store);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_VIEWS_H_
