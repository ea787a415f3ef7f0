// The only include of mpi.h, without the C++ bindings that old versions bring.
#ifndef KERAS_DDL_MPI_MPI_INCLUDE_H_
#define KERAS_DDL_MPI_MPI_INCLUDE_H_

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>  // MPIX_ERR_PROC_FAILED
#endif

#endif  // KERAS_DDL_MPI_MPI_INCLUDE_H_
