"""Writes timelines: when each collective was submitted, agreed on, started and finished, for chrome://tracing.

KERAS_DDL_TIMELINE=/tmp/timeline.json makes every rank write a timeline from `init` to its end: rank 0 to
/tmp/timeline.rank0.json, and so on. `start` and `stop` do the same for a part of a program, and `merge` combines the
files of the ranks. chrome://tracing and Perfetto show each rank as a process, with a line for steps (added by `span`; a
Strategy adds each step of fit) and a line for collectives, with each collective's waiting time above. Cost: about two
microseconds per collective; nothing if no timeline is written.
"""

from __future__ import annotations

import os
from pathlib import Path

from keras_ddl import communicator
from keras_ddl.communicator import recording
from keras_ddl.communicator.native import native_timeline
from keras_ddl.communicator.recording import add_span, is_on, path_of_rank, span, stop
from keras_ddl.timeline.files import Collective, collectives, collectives_of, merge, read

__all__ = [
    "Collective",
    "add_span",
    "collectives",
    "collectives_of",
    "is_on",
    "keep",
    "merge",
    "path_of_rank",
    "read",
    "span",
    "start",
    "stop",
    "take",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def start(path: str | os.PathLike[str]) -> Path:
    """Begins this rank's timeline and returns its file: `path` with .rankN before its suffix. Not collective.

    Raises: ConfigError: a timeline is being written already, or the file cannot be written.
    """
    return recording.start(path, communicator.rank())


def keep(capacity: int = 4096) -> None:
    """Keeps this rank's newest collectives in memory for `take` from now on, with or without a timeline; 0: none.

    Cost: as a timeline, without the file.
    """
    recording.keep(capacity)


def take() -> list[Collective]:
    """Returns and removes the collectives in memory, in the order in which they finished, without their kind."""
    rank = communicator.rank()
    return [Collective(rank, "", *one) for one in native_timeline.take()]
