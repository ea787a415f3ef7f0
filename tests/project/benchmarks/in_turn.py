"""Runs programs one after another in the ranks of one job, because starting a job takes longer than most of them.

    keras-ddl run -np 2 python in_turn.py FOLDER "PROGRAM ARGUMENTS..." ...

Writes FOLDER/NUMBER.RANK when program NUMBER has ended on a rank. A program that fails ends the job.
"""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path

import keras_ddl


def main() -> None:
    folder, *commands = sys.argv[1:]
    for number, command in enumerate(commands):
        sys.argv = shlex.split(command)
        beside = str(Path(sys.argv[0]).parent)
        sys.path.insert(0, beside)  # as Python does for a script
        print(f"==== {number}", flush=True)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.path.remove(beside)
        sys.stdout.flush()
        Path(folder, f"{number}.{keras_ddl.rank()}").touch()
        keras_ddl.barrier()


if __name__ == "__main__":
    main()
