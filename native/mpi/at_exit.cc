// The end of a rank's process, and the consensus of all ranks on the status to end with.
//
// A rank that ends with a status other than 0 must not wait forever for the others in MPI_Finalize: they may be waiting
// for it in a collective, and the launcher would never learn the status. A rank that fails because another one has left
// must learn whether that rank ended with its own status. If so, the job ends with that status, otherwise with the
// error.
#include "at_exit.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <mutex>

#include "ddl_mpi.h"

namespace ddl_mpi {
namespace {

// Time to find the root cause. Without MPI_Finalize the launcher ends the whole job, so the other ranks get this much
// time to end with their own error or to write their output.
constexpr double kAttributionSeconds = 3.0;
constexpr useconds_t kPollUs = 1000;

// A failing thread and the end of the process may run at the same time. The mutex guards all variables below.
std::mutex mutex;
MPI_Comm consensus = MPI_COMM_NULL;
bool all_take_part = true;
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
  fflush(nullptr);  // exit does this after the handlers, which may be too late
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
  if (consensus == MPI_COMM_NULL && all_take_part) consensus = comm;
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
  ddl_mpi::all_take_part = false;
}

int ddl_mpi_finalize_at_exit(void) { return on_exit(ddl_mpi::AtExit, nullptr); }
