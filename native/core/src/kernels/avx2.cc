#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mf16c"
#endif

#include "kernels/adaptive_sum_vectors.h"
#include "kernels/narrow.h"

namespace ddl {

const KernelTable kAvx2Kernels = DDL_KERNEL_TABLE("AVX2");

}  // namespace ddl
