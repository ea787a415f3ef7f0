"""Shares the machine among tests under pytest-xdist: which tests go to one worker, in which order, and which run alone.

Tests often wait for their ranks, so running one test more than there are cores keeps the cores busy. Tests that share a
launch of ranks, a built package or trained models go to one worker. Tests marked `quiet` mostly wait for a counted
number of seconds: they run beside each other, one per worker, but not beside other tests. Tests marked `alone` need the
machine to themselves. Both wait until no test of another kind runs, and hold others off while they run. So a unit is
of one kind, and all workers move to the next kind together; otherwise a worker would wait very long in the middle of
its unit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest
from xdist.scheduler import LoadScopeScheduling

_KINDS = ("any", "quiet", "alone")
ORDINARY_AT_ONCE = len(os.sched_getaffinity(0)) + 1  # tests of the kind `any`, and workers of `pytest -n auto`
# Longest first, so that short ones are left for the end.
_ORDER = (
    *("strategy", "cut", "horovod", "callbacks", "communicator", "ops", "torch", "benchmarks", "packaging"),
    *("notebooks", "examples", "docs", "ddl", "serving", "export", "launch", "unit", "compat", "cli", "timeline"),
)
# Folders whose tests start their own ranks and share nothing. Many of them mostly wait, so they are distributed one by
# one, and no worker keeps a whole file while the others have nothing to do.
_DISTRIBUTED_ONE_BY_ONE = ("communicator", "launch")


class Scheduler(LoadScopeScheduling):
    """Distributes tests in units of what they share, in the order of `arrange`."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # would sort by number of tests
        super().__init__(config, log)
        self._units: dict[str, str] = {}

    def add_node_collection(self, node: object, collection: Sequence[str]) -> None:
        self._units = units_in(collection)
        super().add_node_collection(node, collection)

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]


def units_in(nodeids: Sequence[str]) -> dict[str, str]:
    """Returns the unit of each test. Only tests that `arrange` left together share a unit; a name that recurs starts
    another unit."""
    units: dict[str, str] = {}
    number, name = 0, None
    for nodeid in nodeids:
        if unit_of(nodeid) != name:
            number, name = number + 1, unit_of(nodeid)
        units[nodeid] = f"{number} {name}"
    return units


def unit_of(nodeid: str) -> str:
    """Returns the name of what a test shares with others."""
    file, _, test = nodeid.partition("::")
    if "/packaging/" in file:
        return "packaging"  # the wheel is built once
    launch = re.fullmatch(r"(\w+)\[check_\w+?-(np\d.*)\]", test)  # rank_tests.py
    if launch:
        return f"{file}::{launch[1]}[{launch[2]}]"
    alone = any(f"/{folder}/" in f"/{file}" for folder in _DISTRIBUTED_ONE_BY_ONE)
    return nodeid if alone else file


def arrange(items: list[pytest.Item]) -> None:
    """Sorts the tests: those marked `quiet` come after the others, and those marked `alone` last; then by unit."""
    folder = Path(__file__).parents[2]
    place = {name: number for number, name in enumerate(_ORDER)}
    kinds = {kind: number for number, kind in enumerate(_KINDS)}
    first: dict[str, int] = {}
    for number, item in enumerate(items):
        first.setdefault(unit_of(item.nodeid), number)

    def key(item: pytest.Item) -> tuple[int, int, int]:
        places = [place[name] for name in item.path.relative_to(folder).parts if name in place]
        return kinds[kind_of(item)], min(places, default=len(place)), first[unit_of(item.nodeid)]

    items.sort(key=key)


def kind_of(item: pytest.Item) -> str:
    """Returns one of _KINDS."""
    return next((kind for kind in ("alone", "quiet") if item.get_closest_marker(kind) is not None), "any")


_kept: dict[str, contextlib.ExitStack] = {}  # by kind: the lock that a test left to the next test of this process


@contextlib.contextmanager
def turn(kind: str, following: str | None = None) -> Iterator[None]:
    """Waits for this user's tests of other kinds (for `alone`: for all), and holds them off during the body.

    `following`: the kind of this worker's next test. If it is the same, others are held off until that test, too, or a
    quiet test could slip in between two tests of a unit, whose rest would have to wait for all quiet tests.
    """
    mine = _kept.pop(kind, None) or _begin(kind)
    try:
        with _slot() if kind == "any" else contextlib.nullcontext():
            yield
    finally:
        if following == kind:
            _kept[kind] = mine
        else:
            mine.close()


def _begin(kind: str) -> contextlib.ExitStack:
    """Holds a lock that running tests of this kind share; locks end with their process."""
    files = contextlib.ExitStack()
    locks = {each: files.enter_context((folder() / each).open("w")) for each in (*_KINDS, "door")}
    while not _enter(kind, locks):
        time.sleep(0.02)
    files.callback(fcntl.flock, locks[kind], fcntl.LOCK_UN)  # closing is not enough: forked children may hold it open
    return files


@contextlib.contextmanager
def _slot() -> Iterator[None]:
    """Waits for one of the ORDINARY_AT_ONCE slots."""
    with contextlib.ExitStack() as files:
        slots = [files.enter_context((folder() / f"slot-{n}").open("w")) for n in range(ORDINARY_AT_ONCE)]
        while (mine := next((each for each in slots if _lock(each)), None)) is None:
            time.sleep(0.02)
        try:
            yield
        finally:
            fcntl.flock(mine, fcntl.LOCK_UN)


def folder() -> Path:
    """Returns the directory that this user's test processes share."""
    path = Path(tempfile.gettempdir()) / f"keras_ddl-tests-{os.getuid()}"
    path.mkdir(exist_ok=True)
    return path


def _enter(kind: str, locks: Mapping[str, IO[str]]) -> bool:
    fcntl.flock(locks["door"], fcntl.LOCK_EX)  # only one process at a time checks and enters
    try:
        if any(_is_held(locks[other]) for other in _KINDS if other != kind or kind == "alone"):
            return False
        fcntl.flock(locks[kind], fcntl.LOCK_SH)
        return True
    finally:
        fcntl.flock(locks["door"], fcntl.LOCK_UN)


def _is_held(lock: IO[str]) -> bool:
    if not _lock(lock):
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def _lock(file: IO[str]) -> bool:
    """Locks a file if nobody else has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
