"""Breaks the project on purpose, one line at a time, and runs the tests that ought to notice.

    make breakages                          # all; more than an hour
    make breakages ARGS="--only serving"    # those with this text in the file, the line or the phrase
    make breakages ARGS="--sample 10"       # a few at random

The breakages are in tools/breakages/, a file per subject, and in a part's tests/breakages.toml. Each has a line, its
replacement, the quick tests that must notice, and what breaks. Neither the sources nor the installed package change.
Python tests run with a copy of the package first on PYTHONPATH, made of links to the installed files and one broken
file. Native tests run from a copy of native/ in build/breakages, which keeps its objects.

Ends with 1 if a breakage was not noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import keras_ddl
from keras_ddl import parts

ROOT = Path(__file__).resolve().parents[1]
TABLES = Path(__file__).with_suffix("")
NATIVE_WORK = ROOT / "build" / "breakages"
PARTS = parts.FOLDERS
_CLEAN_UP_SECONDS = 30.0  # for interrupted tests to end their processes
_NO_TESTS = (4, 5)  # pytest's statuses for a wrong command line and for no test


class Unusable(Exception):
    """A breakage cannot be applied or tried; the text says why."""


@dataclass(frozen=True)
class Breakage:
    """One line to break.

    `line`, `broken`: without indentation. `tests`: arguments for pytest; for native code, names of ctest, for which
    ninja builds `target`. `needs`: a Python package without which the tests are skipped.
    """

    file: str
    line: str
    broken: str
    tests: str
    breaks: str
    target: str = ""
    needs: str = ""

    @property
    def is_native(self) -> bool:
        return self.file.startswith("native/")

    def __str__(self) -> str:
        return f"{self.file}: {self.breaks}"

    def apply(self, text: str) -> str:
        """Returns the text of the file with the line broken.

        Raises: Unusable: the line does not occur exactly once, or the result is not valid Python.
        """
        lines = text.split("\n")
        places = [number for number, line in enumerate(lines) if line.strip() == self.line]
        if len(places) != 1:
            raise Unusable(f"{self.file}: the line must occur exactly once. Received: {len(places)} of {self.line!r}.")
        line = lines[places[0]]
        lines[places[0]] = line[: len(line) - len(line.lstrip())] + self.broken
        result = "\n".join(lines)
        if self.file.endswith(".py"):
            try:
                compile(result, self.file, "exec")
            except SyntaxError as error:
                raise Unusable(f"{self.file}: {self.broken!r} is not valid Python there: {error}.") from None
        return result


@dataclass(frozen=True)
class Verdict:
    """The result of the tests on a breakage.

    `kind`: "noticed", "NOT NOTICED", "skipped" or "ERROR"; with --unbroken "passed" and "FAILED" for the first two, in
    the other order. `note`: details.
    """

    kind: str
    note: str = ""
    output: str = ""


def main() -> None:
    arguments = _parse()
    breakages = chosen(read_tables(), arguments.only, arguments.sample, arguments.seed)
    if arguments.list:
        for each in breakages:
            print(f"{each}\n    {each.line}\n    {each.broken}\n    {each.tests}")
        return
    if arguments.unbroken:
        breakages = list({(each.tests, each.target): each for each in breakages}.values())
    start = time.monotonic()
    verdicts = []
    with ThreadPoolExecutor(arguments.jobs) as pool, _ended_by_signals(pool):
        running = {}
        for each in breakages:
            running[pool.submit(_timed, each, arguments.seconds, arguments.unbroken)] = each
        for done in as_completed(running):
            verdict, seconds = done.result()
            verdicts.append(verdict)
            note = f" ({verdict.note})" if verdict.note else ""
            print(f"{verdict.kind:11} {seconds:4.0f} s  {running[done]}{note}", flush=True)
            if arguments.show and verdict.kind in arguments.show:
                print(verdict.output, flush=True)
    sys.exit(summary(verdicts, time.monotonic() - start))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="breakages with this in the file, the line or the phrase")
    parser.add_argument("--list", action="store_true", help="show the breakages and run nothing")
    parser.add_argument("--sample", type=int, metavar="N", help="only N breakages, chosen at random")
    parser.add_argument("--seed", type=int, help="seed of the sample (default: a new one each time)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="breakages at a time (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=600, help="limit for a breakage's tests; more counts as noticed (%(default)s)"
    )
    parser.add_argument(
        "--unbroken", action="store_true", help="break nothing, to show that all of the tests pass then"
    )
    parser.add_argument(
        "--show", action="append", metavar="VERDICT", help="print the tests' output for this verdict, as 'NOT NOTICED'"
    )
    return parser.parse_args()


def read_tables() -> list[Breakage]:
    """Returns the breakages of tools/breakages/ and of the installed parts, by file."""
    found = []
    part_tables = [ROOT / folder / "tests" / "breakages.toml" for folder in PARTS.values()]
    for path in [*sorted(TABLES.glob("*.toml")), *filter(Path.exists, part_tables)]:
        found += [Breakage(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["breakage"]]
    return found


def chosen(breakages: Sequence[Breakage], only: str | None, sample: int | None, seed: int | None) -> list[Breakage]:
    """Returns the breakages that --only, --sample and --seed select."""
    left = [each for each in breakages if only is None or only in f"{each.file}\n{each.line}\n{each.breaks}"]
    if sample is not None and sample < len(left):
        seed = random.randrange(10**6) if seed is None else seed
        print(f"--seed {seed}")
        places = sorted(random.Random(seed).sample(range(len(left)), sample))
        left = [left[place] for place in places]
    return left


def summary(verdicts: Sequence[Verdict], seconds: float) -> int:
    """Prints the rate; returns the exit status."""
    kinds = [verdict.kind for verdict in verdicts]
    good = "passed" if {"passed", "FAILED"} & set(kinds) else "noticed"
    tried = len([kind for kind in kinds if kind not in ("skipped", "ERROR")])
    rest = "".join(f", {kinds.count(kind)} {kind}" for kind in ("skipped", "ERROR") if kind in kinds)
    print(f"{kinds.count(good)} of {tried} {good}{rest}, in {seconds:.0f} s")
    return int(kinds.count(good) < tried or "ERROR" in kinds)


# ---- one breakage ----------------------------------------------------------------------------------------------------


def _timed(breakage: Breakage, limit_seconds: float, unbroken: bool) -> tuple[Verdict, float]:
    start = time.monotonic()
    try:
        verdict = (_try_native if breakage.is_native else _try_python)(breakage, limit_seconds, unbroken)
    except Unusable as error:
        verdict = Verdict("ERROR", str(error))
    if unbroken:
        kind = {"noticed": "FAILED", "NOT NOTICED": "passed"}.get(verdict.kind, verdict.kind)
        verdict = replace(verdict, kind=kind)
    return verdict, time.monotonic() - start


def _try_python(breakage: Breakage, limit_seconds: float, unbroken: bool) -> Verdict:
    if breakage.needs and importlib.util.find_spec(breakage.needs) is None:
        return Verdict("skipped", f"{breakage.needs} is not installed")
    broken = breakage.apply((ROOT / breakage.file).read_text(encoding="utf-8"))
    with overlay(None if unbroken else breakage.file, broken) as (environment, changed):
        words = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0"]
        status, output = _run([*words, *shlex.split(breakage.tests)], environment, limit_seconds)
        was_imported = changed is None or any(changed.parent.glob(f"__pycache__/{changed.stem}.*.pyc"))
    if status is None:
        return Verdict("noticed", f"more than {limit_seconds:.0f} s", output)
    if status in _NO_TESTS:
        return Verdict("ERROR", f"pytest ended with {status}, so there are no such tests", output)
    if status != 0:
        return Verdict("noticed", "", output)
    if not re.search(r"\d+ passed", output):
        return Verdict("skipped", "all of its tests are skipped", output)
    return Verdict("NOT NOTICED", "" if was_imported else "the tests do not import the file", output)


@contextlib.contextmanager
def overlay(file: str | None, text: str = "") -> Iterator[tuple[dict[str, str], Path | None]]:
    """Copies the installed package as links, with one file (named as in the repository) replaced by `text`.

    Yields: the environment for processes that should import the copy, and the path of that file in it. At the end all
        processes with that environment are killed, and the copy is removed.
    """
    with tempfile.TemporaryDirectory(prefix="broken-") as name:
        folder = Path(name).resolve()
        site = folder / "site"
        _link_tree(ROOT / "keras_ddl", site / "keras_ddl")
        for name, place in PARTS.items():
            if (ROOT / place).is_dir():
                _link_tree(ROOT / place, site / "keras_ddl" / name)
        _link_tree(ROOT / "integrations" / "ddl" / "top_level" / "ddl", site / "ddl")
        for library in _libraries():
            (site / "keras_ddl" / library.name).symlink_to(library)
        # Replaces the module by which the editable installation finds the sources.
        (site / "_editable_skbc_keras_ddl.py").touch()
        changed = None
        if file is not None:
            changed = site / installed_name(file)
            changed.unlink()
            changed.write_text(text, encoding="utf-8")
            for compiled in changed.parent.glob(f"__pycache__/{changed.stem}.*.pyc"):
                compiled.unlink()
        (folder / "tmp").mkdir()
        paths = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(folder / "tmp")}
        own |= {"PYTHONDONTWRITEBYTECODE": "", "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "tmp" / "hypothesis")}
        try:
            yield os.environ | own, changed
        finally:
            _kill_all(f"PYTHONPATH={folder}")


def installed_name(file: str) -> str:
    """Returns the path in site-packages of a repository file."""
    for name, folder in PARTS.items():
        if file.startswith(f"{folder}/"):
            return f"keras_ddl/{name}{file.removeprefix(folder)}"
    return file


def _libraries() -> list[Path]:
    """Returns the native libraries of the installed keras_ddl."""
    found = [path for path in keras_ddl.__path__ for path in Path(path).glob("*.so")]
    if not found:
        raise Unusable("keras_ddl must be installed: `make setup`.")
    return found


def _link_tree(source: Path, goal: Path) -> None:
    for folder, _, files in os.walk(source):
        to = goal / Path(folder).relative_to(source)
        to.mkdir(parents=True, exist_ok=True)  # a folder may remain from code that has moved to a part
        for name in files:
            (to / name).symlink_to(Path(folder, name))


# ---- native code -----------------------------------------------------------------------------------------------------

_native = threading.Lock()


def _try_native(breakage: Breakage, limit_seconds: float, unbroken: bool) -> Verdict:
    if not all(map(shutil.which, ("cmake", "ninja", "ctest"))):
        return Verdict("skipped", "cmake, ninja or ctest is missing")
    broken = breakage.apply((ROOT / breakage.file).read_text(encoding="utf-8"))
    with _native, _native_copy() as copy:
        if not unbroken:
            (copy / breakage.file).write_text(broken, encoding="utf-8")
        build = copy / "objects"
        options = ["-DKERAS_DDL_TESTS=ON", "-DKERAS_DDL_MPI=OFF", "-DKERAS_DDL_TF=OFF"]
        status, output = 0, ""
        if not (build / "build.ninja").exists():
            status, output = _run(["cmake", "-S", str(copy / "native"), "-B", str(build), "-G", "Ninja", *options])
        if status == 0:
            status, output = _run(["ninja", "-C", str(build), "-j", "1", *breakage.target.split()])
        if status != 0:
            return Verdict("ERROR", "it does not build", output)
        regex = f"^({'|'.join(breakage.tests.split())})$"
        words = ["ctest", "--test-dir", str(build), "-R", regex, "--output-on-failure", "--no-tests=error"]
        status, output = _run(words, dict(os.environ), limit_seconds)
    if "No tests were found" in output:
        return Verdict("ERROR", f"ctest has no {breakage.tests}", output)
    return Verdict("NOT NOTICED" if status == 0 else "noticed", "", output)


@contextlib.contextmanager
def _native_copy() -> Iterator[Path]:
    """Yields build/breakages with a fresh copy of native/; unchanged files keep their times."""
    NATIVE_WORK.mkdir(parents=True, exist_ok=True)
    with (NATIVE_WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        source = ROOT / "native"
        for path in source.rglob("*"):
            copy = NATIVE_WORK / "native" / path.relative_to(source)
            if path.is_file() and (not copy.exists() or copy.read_bytes() != path.read_bytes()):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        yield NATIVE_WORK


# ---- processes -------------------------------------------------------------------------------------------------------

_running: set[subprocess.Popen[bytes]] = set()


def _run(
    words: Sequence[str], environment: Mapping[str, str] | None = None, limit_seconds: float | None = None
) -> tuple[int | None, str]:
    """Runs a command in the repository's root. Returns its status (None: it took too long) and its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        _running.add(process)
        try:
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
            _end(process)
        finally:
            _running.discard(process)
        output.seek(0)
        return status, output.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process, so that its tests end their ranks; kills it if that takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_CLEAN_UP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _kill_all(beginning: str) -> None:
    """Kills the processes that have a variable with this beginning in their environment."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"\0{beginning}".encode() in b"\0" + (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue  # already ended, or another user's


@contextlib.contextmanager
def _ended_by_signals(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Ends running tests and removes the copies on SIGINT and SIGTERM."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(_running):
            _end(process)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
