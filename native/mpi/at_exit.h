// The communicator of ddl_mpi_exit_status_consensus and ddl_mpi_finalize_at_exit.
#ifndef KERAS_DDL_MPI_AT_EXIT_H_
#define KERAS_DDL_MPI_AT_EXIT_H_

#include "mpi_include.h"

namespace ddl_mpi {

// Ranks that are ending tell the others through `comm`, which is never freed; only the first communicator counts.
void AgreeOnExitStatusOver(MPI_Comm comm);
bool IsOfConsensus(MPI_Comm comm);

}  // namespace ddl_mpi
#endif  // KERAS_DDL_MPI_AT_EXIT_H_
