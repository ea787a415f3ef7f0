// The shortest time in which the cache lines of an all-reduce can move between the cores of a host.
//
// If ranks cannot read each other's arrays, each rank must write its data to shared memory, and read the other ranks'
// data there. With N bytes and L ranks, a rank writes (L-1)/L N of inputs and N/L of results, and reads (L-1)/L N of
// each, in two passes (reduce-scatter and all-gather: the smallest possible number of bytes, Patarasuk and Yuan 2009).
// Or it writes N and reads (L-1) N in one pass. Here ranks only write and read: they add nothing, synchronise with
// one flag per rank and pass, and copy lines with the core's fastest instructions (Store::kRepMovsb). Memory is
// used in turns, like the engine's slots.
#ifndef KERAS_DDL_BENCH_HAND_OVER_H_
#define KERAS_DDL_BENCH_HAND_OVER_H_

#include <cstddef>

extern "C" {

// Returns the bytes of `shared` that `size` ranks need for arrays of `bytes`.
__attribute__((visibility("default"))) size_t hand_over_shared_bytes(int size, size_t bytes);

// Returns the seconds per all-reduce of `bytes`, the mean of `repeat`. COLLECTIVE over the ranks that map `shared`,
// which is zero before the first call. `own`: `bytes` bytes that only this rank uses. `whole`: use one pass.
__attribute__((visibility("default"))) double hand_over_seconds(char* shared, int rank, int size, char* own,
                                                                size_t bytes, int repeat, int whole);
}

#endif  // KERAS_DDL_BENCH_HAND_OVER_H_
