// The baseline that DDL_FLAG_PLAIN_MPI asks for: MPI_Allreduce alone, if MPI has the type and the operation.
#ifndef KERAS_DDL_MPI_PLAIN_ALL_REDUCE_H_
#define KERAS_DDL_MPI_PLAIN_ALL_REDUCE_H_

#include "ddl.h"
#include "mpi_include.h"

namespace ddl_mpi {

// Reduces `count` elements of `in` over all ranks of `comm` into `out`, with the results ddl.h promises: float16 and
// bfloat16 in float32 with one rounding, exact integer means, NaN through min and max. Returns an MPI error code, and
// the name of the failed call in *call.
// COLLECTIVE: all ranks, equal count, dtype and op. REQUIRES: `out` equals `in` or does not overlap it.
int PlainAllReduce(MPI_Comm comm, const void* in, void* out, uint64_t count, ddl_dtype dtype, ddl_op op,
                   const char** call);

}  // namespace ddl_mpi
#endif  // KERAS_DDL_MPI_PLAIN_ALL_REDUCE_H_
