"""Runs jobs: starts the ranks, shows their output, and ends all of them when one fails.

    keras-ddl run / keras_ddl.run()  ->  job.py  ->  host_ranks.py  ->  rank_process.py (one per rank)  ->  the program
                                            ^______ link/: one connection per rank ___________|

On other hosts ssh starts host_ranks.py; an mpirun can replace it (mpi/). They only start processes. Output, errors,
exit statuses and orders to stop are sent over each rank's connection, because hosts may share no file system, and
because an mpirun's own status cannot be trusted (Open MPI 5 returns 0 after a host has died). docs/launch.md describes
the user's view.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_ddl.launch.run_function import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because every rank's wrapper imports this package and does not need run()'s imports.
    if name == "run":
        from keras_ddl.launch.run_function import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
