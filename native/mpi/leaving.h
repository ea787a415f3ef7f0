// Frees communicators that this rank has left, when every rank has.
#ifndef KERAS_DDL_MPI_LEAVING_H_
#define KERAS_DDL_MPI_LEAVING_H_

#include "mpi_include.h"

namespace ddl_mpi {

// Takes over `comm`, which this rank uses no more. `clean`: what it has begun there has ended. If it is so on all
// ranks, and all of them make further communicators, it is freed; otherwise MPI_Finalize has it. Never blocks; any
// thread.
void Leave(MPI_Comm comm, bool clean);

// Tells the other ranks of the communicators left so far that this one has left, and frees those that all have. Called
// where a communicator is made, so a program that only ends sends nothing. Never blocks; any thread.
void FreeWhatAllHaveLeft();

}  // namespace ddl_mpi
#endif  // KERAS_DDL_MPI_LEAVING_H_
