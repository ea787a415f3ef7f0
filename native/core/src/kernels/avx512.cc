#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif

#include "kernels/adaptive_sum_vectors.h"
#include "kernels/narrow.h"

namespace ddl {

const KernelTable kAvx512Kernels = DDL_KERNEL_TABLE("AVX-512");

}  // namespace ddl
