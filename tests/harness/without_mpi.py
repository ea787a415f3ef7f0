"""Starts ranks on one host like the launcher: `without_mpi.py NUMBER PROGRAM ARGUMENTS...`.

Like mpirun, it ends the other ranks if one ends with an error, and exits with that rank's status.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_MOMENT_SECONDS = 1.0  # for the others to end by themselves


def main(size: int, command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        ranks = [subprocess.Popen(command, env=os.environ | environment(rank, size, directory)) for rank in range(size)]
        first, end_at = 0, float("inf")
        while None in [rank.poll() for rank in ranks]:
            first = first or next((rank.returncode for rank in ranks if rank.returncode), 0)
            if first and end_at == float("inf"):
                end_at = time.monotonic() + _MOMENT_SECONDS
            if time.monotonic() > end_at:
                for rank in ranks:
                    rank.kill()
            time.sleep(0.02)
    first = first or next((rank.returncode for rank in ranks if rank.returncode), 0)
    return first if first >= 0 else 128 - first


def environment(rank: int, size: int, directory: str | Path) -> dict[str, str]:
    """Returns the variables that make a process this rank; the ranks' sockets are in `directory`."""
    return {
        "KERAS_DDL_HOST_RANK": f"{rank}/{size}@{directory}",
        "MPI4PY_LIBMPI": "/no MPI here",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
    }


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
