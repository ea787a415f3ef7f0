"""How tests share the machine under pytest-xdist: which go to one worker, in which order, and which run alone.

Tests wait for their ranks often enough that two workers use two cores better than one. What is started once for
several tests (a launch of ranks, a built package, trained models) belongs to one worker. Tests marked `alone` need the
machine to themselves: they wait until no other test runs, and none starts meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# Longest first: what is left for the end should be short.
_ORDER = (
    *("strategy", "communicator", "ops", "callbacks", "benchmarks", "packaging", "notebooks", "examples", "docs"),
    *("export", "launch", "cli", "timeline", "harness"),
)


class Scheduler(LoadScopeScheduling):
    """Gives tests out in units of what they share, in the order of `arrange`."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # by number of tests, that is
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """The name of what a test shares with others."""
    file, _, test = nodeid.partition("::")
    if "/packaging/" in file:
        return "packaging"  # the wheel is built once
    launch = re.fullmatch(r"(\w+)\[check_\w+?-(np\d.*)\]", test)  # rank_tests.py
    return f"{file}::{launch[1]}[{launch[2]}]" if launch else file


def arrange(items: list[pytest.Item]) -> None:
    """Sorts the tests: those marked `alone` come last."""
    folder = Path(__file__).parents[1]
    place = {name: number for number, name in enumerate(_ORDER)}
    items.sort(key=lambda item: (is_alone(item), place.get(item.path.relative_to(folder).parts[0], len(place))))


def is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@contextlib.contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Holds this user's other tests off while one that is to run alone does, and the other way round."""
    with (Path(tempfile.gettempdir()) / f"keras_ddl-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing would not do: forked children may hold it open
