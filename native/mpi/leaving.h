// Frees communicators once every rank has left them.
#ifndef KERAS_DDL_MPI_LEAVING_H_
#define KERAS_DDL_MPI_LEAVING_H_

#include "mpi_include.h"

namespace ddl_mpi {

// Takes over `comm`, which this rank no longer uses. `clean`: every operation that it began there has ended. If all
// ranks leave cleanly and later make further communicators, `comm` is freed; otherwise it stays until MPI_Finalize.
// Never blocks; any thread.
void Leave(MPI_Comm comm, bool clean);

// Tells the other ranks which communicators this rank has left, and frees the communicators that all ranks have left.
// It is called when a communicator is made, so that a program that only ends sends nothing. Never blocks; any thread.
void FreeLeftCommunicators();

}  // namespace ddl_mpi
#endif  // KERAS_DDL_MPI_LEAVING_H_
