"""Finds out, in a separate process, which MPI the native library uses.

Loading the library loads MPI, which may install signal and memory hooks. The launcher, and above all a notebook's
kernel, must not have such hooks.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

from keras_ddl.launch.rank.rank_environment import python_path

_FUNCTIONS = {
    "family": "ddl_mpi_library",
    "version": "ddl_mpi_loaded_version",
    "path": "ddl_mpi_loaded_path",
    "site_launcher": "ddl_mpi_site_launcher",
}
_CODE = f"""
import json, sys
from keras_ddl.communicator.native import native_library
first = sys.argv[1:]
native_library.choose_mpi(*sorted(native_library.mpi_families(), key=lambda family: family not in first))
print(json.dumps({{key: native_library.mpi_text(name) for key, name in {_FUNCTIONS!r}.items()}}))
"""


@functools.cache
def describe(family: str = "") -> dict[str, str]:
    """Returns the MPI's family, version, path and site_launcher ("" unless built for a site's MPI).

    If it cannot be loaded, returns {"problem": why}.

    `family`: "Open MPI" or "MPICH", preferred if the native library supports several MPIs.

    Cost: about 0.2 s, once per process.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CODE, family],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    if done.returncode != 0:
        return {"problem": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no answer"}
    return json.loads(done.stdout)
