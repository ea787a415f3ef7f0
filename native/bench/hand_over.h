// How long it takes at least to pass the cache lines of an all-reduce between the cores of a host.
//
// Where the others cannot see a rank's arrays, it must write what they do not know to where they see it, and read what
// it does not know. Of N bytes among L ranks, (L-1)/L N of inputs and N/L of results are written, (L-1)/L N of each are
// read, in two passes (reduce-scatter and all-gather: the fewest bytes that there are, Patarasuk and Yuan 2009); or N
// are written and (L-1) N read in one pass. Here ranks do that and nothing else: nothing is added, there is no
// rendezvous but one flag per rank and pass, and lines are written and read by the fastest means of the core
// (Store::kRepMovsb). Memory is used in turns as the engine's slots are.
#ifndef KERAS_DDL_BENCH_HAND_OVER_H_
#define KERAS_DDL_BENCH_HAND_OVER_H_

#include <cstddef>

extern "C" {

// Bytes of `shared` that `size` ranks need for arrays of `bytes`.
__attribute__((visibility("default"))) size_t hand_over_shared_bytes(int size, size_t bytes);

// Seconds per all-reduce of `bytes`, over `repeat` of them. COLLECTIVE over the ranks that map `shared`, which is zero
// before the first call. `own`: `bytes` that only this rank uses. `whole`: in one pass.
__attribute__((visibility("default"))) double hand_over_seconds(char* shared, int rank, int size, char* own,
                                                                size_t bytes, int repeat, int whole);
}

#endif  // KERAS_DDL_BENCH_HAND_OVER_H_
