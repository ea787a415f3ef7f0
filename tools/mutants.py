"""Changes the rules of the cut one at a time, and shows which changes its tests do not notice.

    make mutants                          # a sample of 60, seeded by the date
    make mutants ARGS="--all"             # all; takes hours
    make mutants ARGS="--only specs/contractions --list"

A mutant (mutations.py) is one small change in one file of keras_ddl/cut/, made in memory; no file changes. First the
unchanged tests run once, to record which of them reach which line. Then each mutant runs the tests that reach its line,
the most promising first, until one fails. If no test notices a mutant, either it does not change what is computed (only
its cost, say), and tests/cut/equivalent_mutants.txt gives the reason, or a test is missing.

Importing TensorFlow and collecting the tests takes longer than most tests, so it is done once. Forks of that process
apply the mutants one after another, by giving live functions the mutant's code. For a change in code that runs on
import (tables of specs), an earlier fork imports the package anew.

Exits with 1 if an unexplained mutant survives.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import io
import json
import multiprocessing
import os
import queue
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from live_mutants import Importer, LiveFunctions
from mutations import PACKAGE, ROOT, Mutant, all_mutants, explained, tree_of
from reach import Reach

_FORK = multiprocessing.get_context("fork")
_ON_IMPORT = "what runs on import"
_NOT_FIT = "fails without any mutant: "
_MARKS = "not (long or slurm or alone or parallel)"  # mutants do not reach ranks in other processes

# ---- running tests ---------------------------------------------------------------------------------------------------


class _Record:
    """A pytest plugin that records which lines each test reaches, and its CPU time."""

    def __init__(self, measured: Any) -> None:
        self._measured, self.seconds, self.failed = measured, dict[str, float](), list[str]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._measured.switch_context(nodeid)
        self.seconds[nodeid] = -time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] += time.process_time()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


class _Failures:
    """A pytest plugin that records which tests fail."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _run_tests(arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
    import pytest

    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", *arguments], list(plugins)))


def _record(tests: str, data: Path) -> str:
    """Writes which lines the tests of a file reach, and beside that their CPU times."""
    import coverage

    measured = coverage.Coverage(data_file=str(data), source_pkgs=[PACKAGE], config_file=False)
    measured.start()
    record = _Record(measured)
    _run_tests([tests, "-m", _MARKS], [record])
    measured.stop()
    measured.save()
    for each in record.failed:  # such as tests that measure time, which recording disturbs
        record.seconds.pop(each, None)
    data.with_suffix(".json").write_text(json.dumps(record.seconds))
    return "\n".join(record.failed)


def _meet_on_import(mutant: Mutant, tests: Sequence[str]) -> str:
    """Returns the test that notices a mutant, or "". Runs in a process that has not imported the package."""
    path = importlib.util.find_spec(mutant.module)
    assert path is not None and path.origin is not None
    for name in [each for each in sys.modules if each.startswith(PACKAGE)]:
        del sys.modules[name]
    sys.meta_path.insert(0, Importer(mutant.module, tree_of(mutant), path.origin))
    failures = _Failures()
    status = _run_tests(["-x", *tests], [failures])
    return (*failures.failed, f"pytest, which ends with {status}" if status else "")[0]


def _be_silent() -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)


def _in_fork(function: Callable[[], str], seconds: float) -> str:
    """Returns a function's result from a fork, or how the fork ended. `seconds`: limit of CPU time."""
    ours, theirs = _FORK.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            _be_silent()
            theirs.send(function())
        os._exit(0)
    theirs.close()
    result = "no test: endless loop"
    with contextlib.suppress(EOFError):
        if ours.poll(600 + 10 * seconds):
            result = "no test: the process was killed"
            result = ours.recv()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    ours.close()
    return result


class _Loop:
    """A pytest plugin that runs the collected tests on mutants, in forks."""

    def __init__(self, requests: Sequence[Connection]) -> None:
        self._requests = requests

    def pytest_runtestloop(self, session: Any) -> bool:
        live = LiveFunctions()
        gc.freeze()
        for each in self._requests:
            if os.fork() == 0:
                with contextlib.suppress(BaseException):
                    _answer(each, session, live)
                os._exit(0)
        for _ in self._requests:
            os.wait()
        return True


def _late(signal_: int, frame: object) -> None:
    raise TimeoutError


class _Worker:
    """A process that runs tests on one mutant after another, so that TensorFlow initializes only once."""

    def __init__(self, session: Any, live: LiveFunctions) -> None:
        self._ours, theirs = _FORK.Pipe()
        self._child = os.fork()
        if self._child == 0:
            with contextlib.suppress(BaseException):
                self._serve(theirs, session, live)
            os._exit(0)
        theirs.close()

    def meet(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> tuple[str, bool]:
        """Returns the test that notices a mutant, or "", and whether the process can take another mutant."""
        self._ours.send((mutant, tests, seconds))
        with contextlib.suppress(EOFError):
            if self._ours.poll(600 + 10 * seconds):
                answer: tuple[str, bool] = self._ours.recv()
                return answer
            return "no test: endless loop", False
        return "no test: the process was killed", False

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        self._ours.close()

    def _serve(self, requests: Connection, session: Any, live: LiveFunctions) -> None:
        os.setpgid(0, 0)
        _be_silent()
        signal.signal(signal.SIGPROF, _late)
        failures = _Failures()
        session.config.pluginmanager.register(failures)
        items = {each.nodeid: each for each in session.items}
        paths = {each.path: each for each in session.items}

        def fails(test: str) -> bool:
            failures.failed.clear()
            item = items[test]
            elsewhere = next((each for path, each in paths.items() if path != item.path), None)  # keeps the session
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=elsewhere)
            return bool(failures.failed)

        while True:
            mutant, tests, seconds = requests.recv()
            before = live.change(mutant)
            if before is None:
                requests.send((_ON_IMPORT, True))
                continue
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                by = next((each for each in tests if fails(each)), "")
            except TimeoutError:
                by = "no test: endless loop"
            is_late = signal.setitimer(signal.ITIMER_PROF, 0)[0] == 0
            live.restore(before)
            # A test that also fails without the mutant suffers from an earlier mutant.
            requests.send((by, not is_late and (by not in items or not fails(by))))


def _answer(requests: Connection, session: Any, live: LiveFunctions) -> None:
    worker: _Worker | None = None
    while (asked := requests.recv()) is not None:
        is_new = worker is None
        worker = worker or _Worker(session, live)
        by, is_fit = worker.meet(*asked)
        if not is_fit and not is_new:
            worker.end()
            worker = _Worker(session, live)
            by, is_fit = worker.meet(*asked)
        if not is_fit and by in asked[1]:
            by = _NOT_FIT + by
        if not is_fit:
            worker.end()
            worker = None
        requests.send(by)
    if worker is not None:
        worker.end()


class Servers:
    """Processes that have collected the tests, each of which runs one mutant at a time."""

    def __init__(self, tests: Sequence[str], count: int) -> None:
        self._pipes = [_FORK.Pipe() for _ in range(count)]
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for ours, _ in self._pipes:
            self._free.put(ours)
        self._process = _FORK.Process(target=self._serve, args=(tests,))
        self._process.start()
        for _, theirs in self._pipes:
            theirs.close()

    def _serve(self, tests: Sequence[str]) -> None:
        for ours, _ in self._pipes:
            ours.close()
        _run_tests([*tests, "-m", _MARKS], [_Loop([theirs for _, theirs in self._pipes])])

    def meet(self, mutant: Mutant, tests: Sequence[str], seconds: float, on_import: bool) -> str:
        """Returns the test that notices a mutant, or ""."""
        pipe, by = self._free.get(), _ON_IMPORT
        if not on_import:
            pipe.send((mutant, tests, seconds))
            by = pipe.recv()
        if by == _ON_IMPORT:
            by = _in_fork(functools.partial(_meet_on_import, mutant, tests), seconds + 30)
        self._free.put(pipe)
        if by.startswith(_NOT_FIT):
            raise RuntimeError(by)
        return by

    def end(self) -> None:
        for ours, _ in self._pipes:
            ours.send(None)
        self._process.join()


# ---- the program -----------------------------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sample", type=int, default=60, metavar="N", help="how many mutants (default: %(default)s)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N of the sample")
    parser.add_argument("--all", action="store_true", help="every mutant; some hours")
    parser.add_argument("--seed", type=int, default=None, help="of the sample (default: the day's)")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name contains TEXT")
    parser.add_argument("--names", type=Path, metavar="FILE", help="mutants whose names are lines of FILE")
    parser.add_argument("--list", action="store_true", help="list the mutants, run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: %(default)s)")
    parser.add_argument("--first", type=float, default=15.0, metavar="SECONDS", help="of tests before others are tried")
    parser.add_argument("--tests", nargs="*", default=["tests/cut"], help="the tests that must notice them")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "mutants", help="where what tests reach is kept"
    )
    parser.add_argument("--record", action="store_true", help="record again what tests reach")
    return parser.parse_args()


def _chosen(asked: argparse.Namespace) -> list[Mutant]:
    mutants = [each for each in all_mutants() if asked.only in each.name]
    if asked.names is not None:
        by_name = {each.name: each for each in mutants}
        return [by_name[each] for each in asked.names.read_text().splitlines() if each in by_name]
    if asked.all or len(mutants) <= asked.sample:
        return mutants
    seed = asked.seed if asked.seed is not None else int(time.time() // 86400)
    print(f"{asked.sample} of {len(mutants)} mutants, --seed {seed}")
    random.Random(seed).shuffle(mutants)  # a larger sample includes the smaller one
    return mutants[asked.skip : asked.sample]


def _reach(asked: argparse.Namespace) -> Reach:
    asked.folder.mkdir(parents=True, exist_ok=True)
    files = [each for name in asked.tests for each in (sorted(Path(name).glob("test_*.py")) or [Path(name)])]
    records = {each: asked.folder / each.stem for each in files}
    missing = [each for each in files if asked.record or not records[each].with_suffix(".json").exists()]

    def record(file: Path) -> tuple[Path, str]:
        records[file].unlink(missing_ok=True)
        return file, _in_fork(functools.partial(_record, str(file), records[file]), 3600)

    with ThreadPoolExecutor(asked.jobs) as pool:
        for file, failed in pool.map(record, missing):
            print(f"recorded which lines {file} reaches; left out: {failed or 'nothing'}", flush=True)
    return Reach(list(records.values()))


def _results(asked: argparse.Namespace, reach: Reach, mutants: Sequence[Mutant]) -> Mapping[Mutant, bool | None]:
    """Returns for each mutant whether a test noticed it; None: no test reaches its file."""
    servers = Servers(asked.tests, asked.jobs)

    def run(mutant: Mutant) -> tuple[Mutant, str | None]:
        chosen, by = reach.tests(mutant, asked.first), None
        for tests in (chosen.first, chosen.others):
            if tests and not by:
                by = servers.meet(mutant, tests, reach.limit(tests), chosen.on_import)
                reach.learn(mutant, tests, by)
        return mutant, by

    noticed: dict[Mutant, bool | None] = {}
    with ThreadPoolExecutor(asked.jobs) as pool:
        for number, (mutant, by) in enumerate(pool.map(run, mutants), 1):
            noticed[mutant] = None if by is None else bool(by)
            word = "NOT REACHED" if by is None else "killed" if by else "SURVIVED"
            shown = f"  [{by.rpartition('/')[2]}]" if by else ""
            print(f"{number:4}/{len(mutants)} {word:11} line {mutant.line}: {mutant.name}{shown}", flush=True)
    servers.end()
    return noticed


def main() -> int:
    """Runs the program. Returns its exit status."""
    asked = _arguments()
    mutants = _chosen(asked)
    if asked.list:
        print(*(each.name for each in mutants), sep="\n")
        return 0
    import tensorflow  # noqa: F401, once for all children; nothing runs here

    noticed = _results(asked, _reach(asked), mutants)
    known = explained()
    survivors = [each for each in mutants if not noticed[each]]
    open_ones = [each for each in survivors if each.name not in known]
    killed = len(mutants) - len(survivors)
    print(f"{killed} of {len(mutants)} killed; {len(survivors) - len(open_ones)} explained")
    for each in open_ones:
        print(f"not noticed: {each.name}")
    return 1 if open_ones else 0


if __name__ == "__main__":
    sys.exit(main())
