// The end of a rank's process, and the consensus of all ranks on the status to end with.
//
// A rank that ends with a status other than 0 must not wait forever for the others in MPI_Finalize: they may be waiting
// for it in a collective, and the launcher would never learn the status. A rank that fails because another one has left
// must learn whether that one has a status of its own: if so, the job must end with it, otherwise with the error.
#include "at_exit.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <mutex>

#include "ddl_mpi.h"

namespace ddl_mpi {
namespace {

// Time to find the root cause. Without MPI_Finalize the launcher ends the whole job: where all ranks end with an error,
// or others still have output to write, they get this long to end as well.
constexpr double kAttributionSeconds = 3.0;
constexpr useconds_t kPollUs = 1000;

// A failing thread and the end of the process may run at the same time: the mutex guards all below.
std::mutex mutex;
MPI_Comm consensus = MPI_COMM_NULL;
bool by_all = true;
// MPI may use these until the process ends.
MPI_Request request = MPI_REQUEST_NULL;
int own_status = 0;
int largest_status = 0;
bool contributed = false;
bool reached = false;

bool IsFinalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

void AtExit(int status, void*) {
  if (IsFinalized()) return;
  fflush(nullptr);  // as exit does after this, which may be too late
  status &= 0xff;
  const double end = MPI_Wtime() + kAttributionSeconds;
  // A rank that ends with 0 waits for all others, as MPI_Finalize would, but notices if one of them fails meanwhile.
  while (ddl_mpi_exit_status_consensus(status) == DDL_MPI_UNDER_WAY && (status == 0 || MPI_Wtime() < end))
    usleep(kPollUs);
  if (status == 0) MPI_Finalize();
}

}  // namespace

void AgreeOnExitStatusOver(MPI_Comm comm) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (consensus == MPI_COMM_NULL && by_all) consensus = comm;
}

bool IsOfConsensus(MPI_Comm comm) {
  const std::lock_guard<std::mutex> lock(mutex);
  return consensus == comm;
}

}  // namespace ddl_mpi

int ddl_mpi_exit_status_consensus(int status) {
  using namespace ddl_mpi;
  const std::lock_guard<std::mutex> lock(mutex);
  if (reached) return largest_status;
  if (consensus == MPI_COMM_NULL || IsFinalized()) return DDL_MPI_UNKNOWN;
  if (!contributed) {
    contributed = true;
    own_status = status;
    if (MPI_Iallreduce(&own_status, &largest_status, 1, MPI_INT, MPI_MAX, consensus, &request) != MPI_SUCCESS) {
      consensus = MPI_COMM_NULL;
      return DDL_MPI_UNKNOWN;
    }
  }
  int done = 0;
  if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
    consensus = MPI_COMM_NULL;
    return DDL_MPI_UNKNOWN;
  }
  reached = done != 0;
  return reached ? largest_status : DDL_MPI_UNDER_WAY;
}

void ddl_mpi_no_exit_status_consensus(void) {
  const std::lock_guard<std::mutex> lock(ddl_mpi::mutex);
  ddl_mpi::by_all = false;
}

int ddl_mpi_finalize_at_exit(void) { return on_exit(ddl_mpi::AtExit, nullptr); }
