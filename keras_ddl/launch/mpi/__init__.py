"""Starts ranks with an mpirun, for programs that use MPI themselves and for sites that allow nothing else."""
