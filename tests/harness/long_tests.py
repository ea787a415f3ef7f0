"""Reports long tests that have not passed since the files they cover changed. Printed by `make test-all`.

tests/long_tests.jsonl has one line per test file with long tests: a digest of the files it covered when all its long
tests last passed in one run. The file is tracked, so that other machines report the same. A test file that ran only in
part, or with a failure or a skip, keeps its old line.

A test file covers more than it needs, so that nothing is missed: itself and everything in its folder except other test
files; tests/harness/ and conftest.py; native/ without its tests; the modules of its part, or of the folder of
keras_ddl with the same name, and everything they import. If there is no such folder: all of keras_ddl/, the parts,
examples/, benchmarks/, notebooks/, docs/ and tools/.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.source_modules import ROOT, structure

RECORD = ROOT / "tests" / "long_tests.jsonl"
EVERYTHING = (
    "keras_ddl",
    "export",
    "resilience",
    "serving",
    "integrations",
    "observe",
    "examples",
    "benchmarks",
    "notebooks",
    "docs",
    "tools",
)


class LongTests:
    """A pytest plug-in. With xdist, each worker tells the controller which tests were collected."""

    def __init__(self, record: Path = RECORD, root: Path = ROOT) -> None:
        self._record, self._root = record, root
        self._collected: dict[str, list[str]] = {}  # {test file: its long tests}
        self._left_out: set[str] = set()  # test files with deselected long tests
        self._passed: dict[str, set[str]] = defaultdict(set)
        self._failed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)  # before -k and -m deselect tests
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("long") is not None:
                self._collected.setdefault(file_of(item.nodeid), []).append(item.nodeid)
        self._left_out |= {file_of(each) for each in config.args if "::" in each}

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self._left_out |= {file_of(item.nodeid) for item in items if item.get_closest_marker("long") is not None}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["long_tests"] = [self._collected, sorted(self._left_out)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        collected, left_out = getattr(node, "workeroutput", {}).get("long_tests", ({}, ()))
        self._collected.update(collected)
        self._left_out.update(left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "long" not in report.keywords:
            return
        if report.outcome != "passed" and not hasattr(report, "wasxfail"):
            self._failed.add(report.nodeid)
        elif report.when == "call":
            self._passed[file_of(report.nodeid)].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if hasattr(config, "workerinput") or "not long" in config.getoption("markexpr") or config.option.collectonly:
            return
        recorded = read(self._record)
        whole = {file for file in self._collected if self._passed_whole(file)}
        for file in whole:
            recorded[file] = digest(self._root, file)
        if whole:
            write(self._record, recorded)
        stale = [file for file in sorted(self._collected.keys() | recorded) if self._is_stale(file, recorded)]
        if stale:
            terminalreporter.section("long tests that have not passed since what they cover changed")
            for file in stale:
                terminalreporter.write_line(file)

    def _passed_whole(self, file: str) -> bool:
        tests = set(self._collected[file])
        return file not in self._left_out and tests <= self._passed[file] and not tests & self._failed

    def _is_stale(self, file: str, recorded: dict[str, str]) -> bool:
        return (self._root / file).exists() and recorded.get(file) != digest(self._root, file)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def read(record: Path) -> dict[str, str]:
    """Returns {test file: digest}."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return {each["file"]: each["digest"] for each in map(json.loads, lines)}


def write(record: Path, digests: dict[str, str]) -> None:
    lines = [json.dumps({"file": file, "digest": digests[file]}) + "\n" for file in sorted(digests)]
    record.write_text("".join(lines), encoding="utf-8")


@functools.cache
def digest(root: Path, file: str) -> str:
    """Returns a digest of the names and contents of all files that a test file covers."""
    total = hashlib.sha256()
    for path in sorted(set(covered(root, root / file))):
        total.update(f"{path.relative_to(root)} {_digest_of(path)}\n".encode())
    return total.hexdigest()[:16]


@functools.cache
def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def covered(root: Path, file: Path) -> Iterator[Path]:
    """Yields the files that a test file covers; see above."""
    folder = file.relative_to(root).parent
    name = folder.parent.name if folder.name == "tests" else folder.name  # name of a part, or of a folder of the core
    yield file
    yield from (path for path in _files(root, str(folder)) if not path.name.startswith("test_"))
    yield from _files(root, "tests/harness")
    yield from (path for path in (root / "conftest.py", root / "pyproject.toml") if path.exists())
    yield from (path for path in _files(root, "native") if path.relative_to(root).parts[1] not in ("tests", "bench"))
    modules = [] if "project" in folder.parts else _modules_of(root, name)
    yield from modules or [path for name in EVERYTHING for path in _files(root, name)]


@functools.cache
def _modules_of(root: Path, folder: str) -> list[Path]:
    """Returns the modules of a folder of keras_ddl and everything they import."""
    project = _project(root)
    start = f"keras_ddl.{folder}"
    waiting = [name for name in project.modules if name == start or name.startswith(f"{start}.")]
    found = set(waiting)
    while waiting:
        # Python imports a module's package first.
        name = waiting.pop()
        parents = [name.rsplit(".", up)[0] for up in range(1, name.count(".") + 1)]
        new = {each for each in (*project.imports_of(name), *parents) if each in project.modules} - found
        found |= new
        waiting += new
    return [project.modules[name] for name in found]


@functools.cache
def _project(root: Path) -> Any:
    return structure("sources").Project(root)


@functools.cache
def _files(root: Path, folder: str) -> list[Path]:
    return [path for path in _project(root).tracked if path.is_relative_to(root / folder) and path.is_file()]
