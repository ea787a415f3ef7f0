// Reduction and copy kernels on host memory. No state, no locks: any thread may call them.
// The instruction set (baseline of the target, AVX2+F16C, AVX-512) is chosen once, at first use, from what the
// processor offers; KERAS_DDL_ISA=baseline|avx2|avx512 lowers it (tests compare them).
#ifndef KERAS_DDL_CORE_KERNELS_KERNELS_H_
#define KERAS_DDL_CORE_KERNELS_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "common/dtypes.h"
#include "ddl.h"

namespace ddl {

// "sum", "all_reduce", ...: the spelling of the Python layer, used in messages.
const char* OpName(ddl_op op);
const char* KindName(ddl_kind kind);
const char* CompressionName(ddl_compression compression);

// How results and staged copies are written.
enum class Store {
  kCached,     // ordinary stores
  kStreaming,  // non-temporal stores where the processor has them: the lines do not stay dirty in this core's cache
  // x86's string move, which overwrites whole lines without reading them first, and leaves them in this core's cache.
  // Several times as fast as ordinary stores into lines that another core has read. Reduce, short copies and processors
  // without it (HasRepMovsb) use ordinary stores.
  kRepMovsb,
};

// The operations that combine element by element, which the functions here take. The others follow them in ddl_op.
constexpr int kElementwiseOps = DDL_ADASUM;

// out[i] = in[0][i] op in[1][i] op ... op in[n-1][i], in exactly this order, n >= 1.
// float16 and bfloat16 are accumulated in float32 and rounded once, to nearest even. Integers wrap. NaN: sum, mean and
// product propagate it; min and max propagate it too (if any operand is NaN the result is NaN), as NumPy does.
// MEAN: sums, then divides by `divisor` (floating dtypes only, in float32 / float64); `divisor` is ignored otherwise.
// The same inputs give bitwise the same result under every instruction set and alignment.
// `out` may equal any in[k] exactly, or overlap none. No alignment is needed.
void Reduce(ddl_dtype dtype, ddl_op op, const void* const* in, int n, void* out, size_t count, double divisor,
            Store store);

// Whether Store::kRepMovsb differs from kCached.
bool HasRepMovsb();

// memcpy with a choice of stores. No overlap.
void Copy(void* out, const void* in, size_t bytes, Store store);

// Fills `out` with the neutral value of `op`: 0 for sum and mean, 1 for product, the largest number (or infinity) for
// min, the smallest for max. `out` is aligned.
void FillNeutral(ddl_dtype dtype, ddl_op op, void* out, size_t count);

// float32 as 16 bits. `to`, `from`: DDL_BFLOAT16 or DDL_FLOAT16. out[i] = in[i] * scale, rounded to nearest even; every
// NaN becomes the same quiet one. `scale`: a power of two whose reciprocal is a normal float32, too. `error` (or null):
// receives the rounding error (in[i] - out[i] / scale) * unit, or 0 if that is not finite.
void Narrow(ddl_dtype to, const float* in, float scale, void* out, float unit, float* error, size_t count);
// out[i] = in[i] * factor, exactly (but for results below the normal float32); `adds`: + out[i].
void Widen(ddl_dtype from, const void* in, float factor, float* out, size_t count, bool adds);
// The largest |in[i]| that is finite; 0 if there is none.
float LargestFinite(const float* in, size_t count);

// Integer means: widened sums. out[i] = int64(in[i]); dtype is int32, int8 or uint8.
void WidenToInt64(ddl_dtype dtype, const void* in, int64_t* out, size_t count);
// out[i] = dtype(in[i] / divisor), rounded toward zero; dtype is an integer type, int64 included (in may equal out).
void DivideFromInt64(ddl_dtype dtype, const int64_t* in, void* out, size_t count, int64_t divisor);

// max over i of |a[i] - b[i]| / max(1, |b[i]|); equal infinities and NaN against NaN count as 0, NaN against a number
// as infinity.
double MaxRelativeDifference(ddl_dtype dtype, const void* a, const void* b, size_t count);

// "AVX-512", "AVX2" or "baseline".
const char* InstructionSetName();

}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_KERNELS_H_
