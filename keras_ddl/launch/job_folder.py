"""The directory of a job on one host, which the last of its ranks removes."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path


def remove_job_folder(folder: Path, patience: float) -> None:
    """Removes the job's directory and the ranks' shared files, if this is the last rank on this host.

    Args:
        patience: seconds after which it is removed with what others still have in it; 0: it stays then.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            names = [each.name for each in folder.iterdir()]
        except FileNotFoundError:  # another rank, or the launcher, was faster
            return
        if any(name.startswith("rank-") for name in names):
            return
        for name in names:
            if name.startswith("keras_ddl-"):  # other files belong to mpirun, which still runs
                shutil.rmtree(folder / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        if time.monotonic() >= deadline:
            if patience:
                shutil.rmtree(folder, ignore_errors=True)
            return
        time.sleep(0.05)
