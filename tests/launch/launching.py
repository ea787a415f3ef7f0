"""Starts keras-ddl as a user would, and checks that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import keras_ddl
from harness import leftovers
from harness.launching import python_path
from harness.leftovers import marked as processes
from harness.waiting import LIMIT_SECONDS, eventually

AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]  # before a command: another user
ROOT = Path(keras_ddl.__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"status {self.status} after {self.seconds:.1f} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Started:
    """A running keras-ddl. `finish` waits for it and checks what it left behind."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        limit_seconds: float = LIMIT_SECONDS,
        main: Sequence[str] = ("-m", "keras_ddl.cli"),
        **popen: object,
    ):
        self.limit_seconds = limit_seconds
        self.mark = uuid.uuid4().hex
        self.may_leave: tuple[str, ...] = ()  # beginnings of file names
        self.folder = folder
        self.tmp = folder / "tmp"
        self.tmp.mkdir(exist_ok=True)
        self.segments: set[str] = set()
        self.over = threading.Event()
        self.began = time.monotonic()
        defaults = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(
            [sys.executable, *main, *arguments],
            cwd=folder,
            env=environment(self.mark, self.tmp, env),
            **{**defaults, **popen},
        )
        self.watcher = threading.Thread(target=self.watch_memory, daemon=True)
        self.watcher.start()

    def watch_memory(self) -> None:
        """Records which files in /dev/shm the job uses, because other jobs on this machine have files there, too."""
        while not self.over.wait(0.2):
            for pid in processes(self.mark):
                try:
                    maps = Path(f"/proc/{pid}/maps").read_text()
                except OSError:
                    continue
                self.segments |= set(re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))

    def wait_for(self, *paths: Path) -> None:
        """Waits until the ranks have created these files."""

        def are_there() -> bool:
            return all(path.exists() for path in paths)

        eventually(lambda: are_there() or self.process.poll() is not None)
        assert are_there(), f"not all of {paths}\n{self.finish()}"

    def finish(self, stdin: bytes | None = None) -> Ended:
        try:
            out, err = self.process.communicate(stdin, timeout=self.limit_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"did not end\n{out}\n{err}") from None
        finally:
            left = self.left_behind()
        seconds = time.monotonic() - self.began
        ended = Ended(self.process.returncode, (out or b"").decode(), (err or b"").decode(), seconds)
        assert not left, f"left behind: {left}\n{ended}"
        return ended

    def left_behind(self, patience: float = 60.0) -> list[str]:
        """Returns this job's processes that are alive `patience` seconds later, its files in the temporary folder,
        and its files in /dev/shm. Kills all its processes."""
        self.over.set()
        self.watcher.join()
        left = [f"process {pid}: {line}" for pid, line in leftovers.end_all(self.mark, patience).items()]
        files = [path for path in self.tmp.iterdir() if not path.name.startswith(self.may_leave or ("\n",))]
        left += [f"file {path}" for path in files]
        return left + [f"shared memory {path}" for path in self.segments if Path(path).exists()]


def environment(mark: str, tmp: Path, env: Mapping[str, str] | None) -> dict[str, str]:
    outer = ("OMPI_", "PMIX_", "PMI_", "KERAS_DDL_", "PYTHONUNBUFFERED")
    result = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    # The launcher itself must allow root, hence OMPI_ above.
    paths = [ROOT] if (ROOT / "native").exists() else []
    result["PYTHONPATH"] = python_path(*paths)
    result["TMPDIR"] = str(tmp)
    result[leftovers.MARK] = mark
    return result | dict(env or {})


def run(arguments: Sequence[str], folder: Path, **options: object) -> Ended:
    """Runs `keras-ddl ARGUMENTS` in `folder` to its end."""
    stdin = options.pop("input", None)
    if stdin is not None:
        options["stdin"] = subprocess.PIPE
    return Started(arguments, folder, **options).finish(stdin)


def write_program(folder: Path, source: str) -> str:
    """Writes a program that has RANK, and `here(name)` to leave a file; returns its name."""
    path = folder / "program.py"
    path.write_text(HEADER + source)
    return path.name


def write_script(path: Path, text: str) -> str:
    """Writes a shell script; returns its path."""
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def run_program(
    folder: Path, source: str, *options: str, np: int | str = 2, words: Sequence[str] = (), **rest: object
) -> Ended:
    """Runs `keras-ddl run -np NP OPTIONS python PROGRAM WORDS` to its end; `source`: see write_program."""
    return run(["run", "-np", str(np), *options, "python", write_program(folder, source), *words], folder, **rest)


def start_program(folder: Path, source: str, *options: str, words: Sequence[str] = (), **rest: object) -> Started:
    """Starts a job of two ranks, as `run_program` does, and waits until both have called here("up")."""
    program = write_program(folder, source)
    started = Started(["run", "-np", "2", *options, "python", program, *words], folder, **rest)
    started.wait_for(folder / "up-0", folder / "up-1")
    return started


HEADER = """\
import os, sys, time
from pathlib import Path
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-1")))
def here(name): Path(f"{name}-{RANK}").touch()
"""


def kill(pid: int) -> None:
    """Kills a process, unless it ended with one that was killed before."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def session(pid: int) -> int | None:
    """Returns the session of a process; None: it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def starter(mark: str) -> int:
    """Returns the process that started the ranks of a job, which has its own session."""
    (found,) = [pid for pid, line in processes(mark).items() if session(pid) == pid and "keras_ddl.cli" not in line]
    return found


# The default starter of a job on one host, and the one for --mpirun.
STARTERS = [
    pytest.param({}, id="host_ranks"),
    pytest.param({"KERAS_DDL_MPIRUN": "mpirun"}, id="mpirun", marks=pytest.mark.long),
]
