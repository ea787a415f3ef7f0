#include "kernels/adaptive_sum_vectors.h"
#include "kernels/narrow.h"

namespace ddl {

const KernelTable kBaselineKernels = DDL_KERNEL_TABLE("baseline");

}  // namespace ddl
