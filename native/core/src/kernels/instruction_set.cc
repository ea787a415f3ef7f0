#include "kernels/instruction_set.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/kernels.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ddl {
namespace {

#if defined(__x86_64__)
bool HasF16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

const KernelTable* Choose() {
  const char* limit = std::getenv("KERAS_DDL_ISA");
  if (limit == nullptr || *limit == '\0') limit = "avx512";
  const bool avx512 = std::strcmp(limit, "avx512") == 0;
  const bool avx2 = avx512 || std::strcmp(limit, "avx2") == 0;
  const bool known = avx2 || std::strcmp(limit, "baseline") == 0;
  if (!known) {
    std::fprintf(stderr, "keras_ddl: KERAS_DDL_ISA must be baseline, avx2 or avx512; ignored. Received: '%s'.\n",
                 limit);
  }
#if defined(__x86_64__)
  __builtin_cpu_init();  // the C library does not promise to have run it before a plugin is loaded
  if ((avx512 || !known) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return &kAvx512Kernels;
  }
  if ((avx2 || !known) && __builtin_cpu_supports("avx2") && HasF16c()) return &kAvx2Kernels;
#endif
  return &kBaselineKernels;
}

}  // namespace

const KernelTable& Kernels() {
  static const KernelTable* const kernels = Choose();
  return *kernels;
}

const char* InstructionSetName() { return Kernels().name; }

}  // namespace ddl
