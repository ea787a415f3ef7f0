// The end of a rank's process. A rank that ends with another status than 0 must not wait for ever for the others in
// MPI_Finalize: they may wait for it in a collective, and the launcher would never learn the status.
#include "at_exit.h"

#include <stdlib.h>
#include <unistd.h>

#include "ddl_mpi.h"

namespace ddl_mpi {
namespace {

// Without MPI_Finalize the launcher ends the whole job. Where all ranks end with an error, or the others still have
// something to write, they are given this long to come to their end as well.
constexpr double kLastWordsSeconds = 3.0;
constexpr useconds_t kLookUs = 1000;

MPI_Comm farewell = MPI_COMM_NULL;

void AtExit(int status, void*) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized) return;
  if ((status & 0xff) == 0) {
    MPI_Finalize();
    return;
  }
  if (farewell == MPI_COMM_NULL) return;
  MPI_Request everyone = MPI_REQUEST_NULL;
  int here = MPI_Ibarrier(farewell, &everyone) != MPI_SUCCESS;
  const double end = MPI_Wtime() + kLastWordsSeconds;
  while (!here && MPI_Wtime() < end) {
    usleep(kLookUs);
    if (MPI_Test(&everyone, &here, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
  }
}

}  // namespace

void SayFarewellOver(MPI_Comm comm) {
  if (farewell == MPI_COMM_NULL) farewell = comm;
}

}  // namespace ddl_mpi

int ddl_mpi_finalize_at_exit(void) { return on_exit(ddl_mpi::AtExit, nullptr); }
