// The reduction itself, over the vectors of simd.h. Included by one source file per instruction set.
//
// A block is one vector of raw elements. Heads and tails that do not fill a block are padded with zeros and go through
// the same vector code, so an element's result cannot depend on where it stands. NaN results are all the same quiet
// NaN: which operand's payload survives an addition is the compiler's choice, and would differ between builds.
#ifndef KERAS_DDL_CORE_KERNELS_REDUCE_H_
#define KERAS_DDL_CORE_KERNELS_REDUCE_H_

#include "kernels/simd.h"
#include "kernels/table.h"

namespace ddl {
namespace {

// ---- element formats: how a block becomes vectors to calculate with ------------------------------------------------

// Float32, float64 and integers: as they are. Integers are calculated without sign, where overflow wraps.
template <typename T>
struct Plain {
  using Element = T;
  using Lanes = Vector<T>;
  using Accumulator = Lanes;
  static DDL_INLINE Accumulator Unpack(Bytes raw) { return (Accumulator)raw; }
  static DDL_INLINE Bytes Pack(Accumulator value) { return (Bytes)value; }
  template <typename F>
  static DDL_INLINE Accumulator Map(Accumulator a, F f) {
    return f(a);
  }
  template <typename F>
  static DDL_INLINE Accumulator Map(Accumulator a, Accumulator b, F f) {
    return f(a, b);
  }
};

struct PairedFloats {
  using Element = uint16_t;
  using Lanes = Floats;
  using Accumulator = FloatPair;
  template <typename F>
  static DDL_INLINE Accumulator Map(Accumulator a, F f) {
    return {f(a.first), f(a.second)};
  }
  template <typename F>
  static DDL_INLINE Accumulator Map(Accumulator a, Accumulator b, F f) {
    return {f(a.first, b.first), f(a.second, b.second)};
  }
};

struct Float16 : PairedFloats {
  static DDL_INLINE Accumulator Unpack(Bytes raw) { return Float16ToFloats(raw); }
  static DDL_INLINE Bytes Pack(Accumulator value) { return FloatsToFloat16(value); }
};

struct Bfloat16 : PairedFloats {
  static DDL_INLINE Accumulator Unpack(Bytes raw) { return Bfloat16ToFloats(raw); }
  static DDL_INLINE Bytes Pack(Accumulator value) { return FloatsToBfloat16(value); }
};

// ---- operations on vectors -----------------------------------------------------------------------------------------

struct Add {
  template <typename V>
  DDL_INLINE V operator()(V a, V b) const {
    return a + b;
  }
};

struct Multiply {
  template <typename V>
  DDL_INLINE V operator()(V a, V b) const {
    return a * b;
  }
};

// Of equal values (0 and -0) the earlier operand stays. The second line lets a NaN in `b` through; one in `a` stays
// because every comparison with it is false.
struct Minimum {
  template <typename V>
  DDL_INLINE V operator()(V a, V b) const {
    const V smaller = b < a ? b : a;
    return b == b ? smaller : b;
  }
};

struct Maximum {
  template <typename V>
  DDL_INLINE V operator()(V a, V b) const {
    const V larger = b > a ? b : a;
    return b == b ? larger : b;
  }
};

// ---- what happens to the accumulated value before it is stored -----------------------------------------------------

struct AsIs {
  template <typename V>
  DDL_INLINE V operator()(V value) const {
    return value;
  }
};

DDL_INLINE Floats QuietNan(Floats) { return Floats{} + __builtin_nanf(""); }
DDL_INLINE Vector<double> QuietNan(Vector<double>) { return Vector<double>{} + __builtin_nan(""); }

template <typename V>
DDL_INLINE V CanonicalNan(V value) {
  return value == value ? value : QuietNan(value);
}

struct Canonical {
  template <typename V>
  DDL_INLINE V operator()(V value) const {
    return CanonicalNan(value);
  }
};

template <typename Scalar>
struct Divided {
  Scalar divisor;
  template <typename V>
  DDL_INLINE V operator()(V value) const {
    return CanonicalNan(value / divisor);
  }
};

template <typename Scalar>
struct Scaled {
  Scalar factor;
  template <typename V>
  DDL_INLINE V operator()(V value) const {
    return CanonicalNan(value * factor);
  }
};

// ---- loops ---------------------------------------------------------------------------------------------------------

constexpr int kBlocks = 4;                             // blocks that are in registers together
constexpr size_t kStepBytes = kBlocks * kVectorBytes;  // raw bytes of one input in them
constexpr int kManyInputs = 8;                         // more streams than this outrun the prefetchers
constexpr int kInputsAtOnce = 4;                       // streams read together then
constexpr size_t kTileBytes = 4096;                    // raw bytes of each then, so that accumulators stay in L1

// Bytes of another rank's slot that are prefetched ahead of their use. The processor's own prefetchers stop at the end
// of each page, and another core's lines are far.
constexpr size_t kPrefetchBytes = 4096;

// For a step of the loops below. May go beyond the end: a prefetch never faults.
DDL_INLINE void Prefetch(const uint8_t* at) {
  for (size_t line = 0; line < kStepBytes; line += kLineBytes) __builtin_prefetch(at + kPrefetchBytes + line);
}

template <bool kStreaming>
DDL_INLINE void Store(uint8_t* address, Bytes raw) {
  if (kStreaming) {
    StoreStreaming(address, raw);
  } else {
    StoreCached(address, raw);
  }
}

template <typename Format, typename Op, int kCount>
DDL_INLINE void Accumulate(typename Format::Accumulator* sum, const uint8_t* next) {
  for (int b = 0; b < kCount; ++b) {
    sum[b] = Format::Map(sum[b], Format::Unpack(Load(next + b * kVectorBytes)), Op());
  }
}

// Reduces kCount whole blocks that start at `offset`; the accumulators stay in registers. kInputs = 2: the hot case,
// without a loop over the inputs; 0: any number.
template <typename Format, typename Op, typename Finish, int kInputs, int kCount, bool kStreaming>
DDL_INLINE void ReduceBlocks(const uint8_t* const* in, int n, uint8_t* out, size_t offset, Finish finish) {
  typename Format::Accumulator sum[kCount];
  for (int b = 0; b < kCount; ++b) sum[b] = Format::Unpack(Load(in[0] + offset + b * kVectorBytes));
  const int inputs = kInputs == 0 ? n : kInputs;
  for (int k = 1; k < inputs; ++k) Accumulate<Format, Op, kCount>(sum, in[k] + offset);
  for (int b = 0; b < kCount; ++b) {
    Store<kStreaming>(out + offset + b * kVectorBytes, Format::Pack(Format::Map(sum[b], finish)));
  }
}

// Reduces kTileBytes that start at `offset`, for many inputs: a few at a time, each read over the whole tile.
template <typename Format, typename Op, typename Finish, bool kStreaming>
void ReduceTile(const uint8_t* const* in, int n, uint8_t* out, size_t offset, Finish finish) {
  typename Format::Accumulator tile[kTileBytes / kVectorBytes];
  for (int first = 0; first < n; first += kInputsAtOnce) {
    const int last = first + kInputsAtOnce < n ? first + kInputsAtOnce : n;
    for (size_t step = 0; step < kTileBytes; step += kStepBytes) {
      const size_t at = offset + step;
      typename Format::Accumulator* const kept = tile + step / kVectorBytes;
      typename Format::Accumulator sum[kBlocks];
      for (int b = 0; b < kBlocks; ++b) {
        sum[b] = first == 0 ? Format::Unpack(Load(in[0] + at + b * kVectorBytes)) : kept[b];
      }
      for (int k = first == 0 ? 1 : first; k < last; ++k) Accumulate<Format, Op, kBlocks>(sum, in[k] + at);
      for (int b = 0; b < kBlocks; ++b) {
        if (last < n) {
          kept[b] = sum[b];
        } else {
          Store<kStreaming>(out + at + b * kVectorBytes, Format::Pack(Format::Map(sum[b], finish)));
        }
      }
    }
  }
}

// Reduces `bytes` <= kVectorBytes bytes at `offset`.
template <typename Format, typename Op, typename Finish>
__attribute__((noinline)) void ReducePartial(const uint8_t* const* in, int n, uint8_t* out, size_t offset, size_t bytes,
                                             Finish finish) {
  Bytes raw{};
  __builtin_memcpy(&raw, in[0] + offset, bytes);
  typename Format::Accumulator sum = Format::Unpack(raw);
  for (int k = 1; k < n; ++k) {
    raw = Bytes{};
    __builtin_memcpy(&raw, in[k] + offset, bytes);
    sum = Format::Map(sum, Format::Unpack(raw), Op());
  }
  raw = Format::Pack(Format::Map(sum, finish));
  __builtin_memcpy(out + offset, &raw, bytes);
}

// Reduces the whole blocks from `offset` on; returns where it stopped. `out` + offset is a multiple of kLineBytes when
// kStreaming.
template <typename Format, typename Op, typename Finish, bool kStreaming>
size_t ReduceBody(const uint8_t* const* in, int n, uint8_t* out, size_t offset, size_t bytes, Finish finish) {
  if (n == 2) {
    const uint8_t* const two[2] = {in[0], in[1]};  // in registers: for all the compiler knows, `out` overlaps `in`
    for (; bytes - offset >= kStepBytes; offset += kStepBytes) {
      Prefetch(two[0] + offset);
      Prefetch(two[1] + offset);
      ReduceBlocks<Format, Op, Finish, 2, kBlocks, kStreaming>(two, n, out, offset, finish);
    }
  }
  if (n > kManyInputs) {
    for (; bytes - offset >= kTileBytes; offset += kTileBytes) {
      ReduceTile<Format, Op, Finish, kStreaming>(in, n, out, offset, finish);
    }
  }
  for (; bytes - offset >= kStepBytes; offset += kStepBytes) {
    for (int k = 0; k < n && n <= kManyInputs; ++k) Prefetch(in[k] + offset);
    ReduceBlocks<Format, Op, Finish, 0, kBlocks, kStreaming>(in, n, out, offset, finish);
  }
  for (; bytes - offset >= kVectorBytes; offset += kVectorBytes) {
    ReduceBlocks<Format, Op, Finish, 0, 1, kStreaming>(in, n, out, offset, finish);
  }
  return offset;
}

template <typename Format, typename Op, typename Finish>
void ReduceAll(const uint8_t* const* in, int n, uint8_t* out, size_t bytes, bool streaming, Finish finish) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(out) % kLineBytes;
  size_t offset = 0;
  // If `out` is not aligned to an element, no element begins at the start of a line: use ordinary stores.
  if (streaming && bytes >= 2 * kLineBytes && misaligned % sizeof(typename Format::Element) == 0) {
    const size_t head = misaligned == 0 ? 0 : kLineBytes - misaligned;
    while (offset < head) {
      const size_t step = head - offset < kVectorBytes ? head - offset : kVectorBytes;
      ReducePartial<Format, Op, Finish>(in, n, out, offset, step, finish);
      offset += step;
    }
    offset = ReduceBody<Format, Op, Finish, true>(in, n, out, offset, bytes, finish);
    StreamingFence();
  } else {
    offset = ReduceBody<Format, Op, Finish, false>(in, n, out, offset, bytes, finish);
  }
  if (offset < bytes) ReducePartial<Format, Op, Finish>(in, n, out, offset, bytes - offset, finish);
}

template <typename Format, typename Op, typename Finish>
void ReduceWith(const uint8_t* const* in, int n, uint8_t* out, size_t bytes, double, bool streaming) {
  ReduceAll<Format, Op, Finish>(in, n, out, bytes, streaming, Finish());
}

// A power of two has an exact reciprocal, so multiplying rounds as dividing would, and costs a tenth.
template <typename Format, typename Scalar>
void ReduceMean(const uint8_t* const* in, int n, uint8_t* out, size_t bytes, double divisor, bool streaming) {
  bool power_of_two = false;
  for (double power = 1; power <= 1 << 30 && !power_of_two; power *= 2) power_of_two = power == divisor;
  if (power_of_two) {
    ReduceAll<Format, Add>(in, n, out, bytes, streaming, Scaled<Scalar>{static_cast<Scalar>(1 / divisor)});
  } else {
    ReduceAll<Format, Add>(in, n, out, bytes, streaming, Divided<Scalar>{static_cast<Scalar>(divisor)});
  }
}

template <bool kStreaming>
void CopyPrefetching(uint8_t* out, const uint8_t* in, size_t bytes) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(out) % kLineBytes;
  size_t offset = misaligned == 0 ? 0 : kLineBytes - misaligned;
  if (offset > bytes) offset = bytes;
  __builtin_memcpy(out, in, offset);
  constexpr size_t kStep = 4 * kLineBytes;
  constexpr size_t kVectors = kStep / kVectorBytes;
  for (; bytes - offset >= kStep; offset += kStep) {
    for (size_t line = 0; line < kStep; line += kLineBytes) __builtin_prefetch(in + offset + kPrefetchBytes + line);
    Bytes value[kVectors];
    for (size_t v = 0; v < kVectors; ++v) value[v] = Load(in + offset + v * kVectorBytes);
    for (size_t v = 0; v < kVectors; ++v) Store<kStreaming>(out + offset + v * kVectorBytes, value[v]);
  }
  for (; bytes - offset >= kVectorBytes; offset += kVectorBytes) Store<kStreaming>(out + offset, Load(in + offset));
  if (kStreaming) StreamingFence();
  __builtin_memcpy(out + offset, in + offset, bytes - offset);
}

// Order of the entries: ddl_dtype, then ddl_op (sum, mean, min, max, product).
// clang-format off
#define DDL_FLOATING_ROW(Format, Scalar)                                                                             \
  {ReduceWith<Format, Add, Canonical>, ReduceMean<Format, Scalar>, ReduceWith<Format, Minimum, Canonical>,            \
   ReduceWith<Format, Maximum, Canonical>, ReduceWith<Format, Multiply, Canonical>}
#define DDL_INTEGER_ROW(Type, Unsigned)                                                                              \
  {ReduceWith<Plain<Unsigned>, Add, AsIs>, ReduceWith<Plain<Unsigned>, Add, AsIs>,                                    \
   ReduceWith<Plain<Type>, Minimum, AsIs>, ReduceWith<Plain<Type>, Maximum, AsIs>,                                    \
   ReduceWith<Plain<Unsigned>, Multiply, AsIs>}
#define DDL_KERNEL_TABLE(name)                                                                                       \
  {name,                                                                                                             \
   {DDL_FLOATING_ROW(Plain<float>, float), DDL_FLOATING_ROW(Plain<double>, double), DDL_FLOATING_ROW(Float16, float), \
    DDL_FLOATING_ROW(Bfloat16, float), DDL_INTEGER_ROW(int32_t, uint32_t), DDL_INTEGER_ROW(int64_t, uint64_t),        \
    DDL_INTEGER_ROW(uint8_t, uint8_t), DDL_INTEGER_ROW(int8_t, uint8_t)},                                             \
   CopyPrefetching<false>, CopyPrefetching<true>,                                                                     \
   {NarrowAll<AsBfloat16>, NarrowAll<AsFloat16>}, {WidenAll<AsBfloat16>, WidenAll<AsFloat16>}, LargestFiniteOf,                  \
   DDL_ADAPTIVE_SUM_KERNELS}
// clang-format on

}  // namespace
}  // namespace ddl
#endif  // KERAS_DDL_CORE_KERNELS_REDUCE_H_
