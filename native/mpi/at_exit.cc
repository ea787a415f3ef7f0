// The end of a rank's process. A rank that ends with another status than 0 must not wait for the others in
// MPI_Finalize: they wait for it in a collective, and the launcher would never learn the status.
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>

#include "ddl_mpi.h"
#include "mpi_include.h"

namespace ddl_mpi {
namespace {

// Where all ranks end with an error, each has this long to say so before the launcher ends the job for the first.
constexpr useconds_t kLastWordsUs = 300'000;

void AtExit(int status, void* process) {
  // A forked child that ends in this way is no rank.
  if (static_cast<intptr_t>(getpid()) != reinterpret_cast<intptr_t>(process)) return;
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized) return;
  if (status == 0) {
    MPI_Finalize();
    return;
  }
  std::fflush(nullptr);
  usleep(kLastWordsUs);
  _exit(status);
}

}  // namespace
}  // namespace ddl_mpi

int ddl_mpi_finalize_at_exit(void) {
  return on_exit(ddl_mpi::AtExit, reinterpret_cast<void*>(static_cast<intptr_t>(getpid())));
}
