"""Starts and stops the timeline of this process, and adds spans to it. Users call keras_ddl.timeline."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from keras_ddl.communicator.native import native_timeline
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.errors import ConfigError


class _Running:
    path: Path | None = None
    keeps = False  # whether collectives are kept in memory


def start(path: str | os.PathLike[str], rank: int) -> Path:
    """Works like keras_ddl.timeline.start, for rank `rank`."""
    own = path_of_rank(path, rank)
    message = native_timeline.start(str(own), rank, f"rank {rank} ({socket.gethostname()})")
    if message:
        raise ConfigError(
            f"timeline: the file must be writable, and no other timeline may be open. Received: {message} (rank "
            f"{rank}). Call keras_ddl.timeline.stop() first, or name a file in a folder that exists on every host."
        )
    _Running.path = own
    return own


def stop() -> Path | None:
    """Ends this rank's timeline and returns its file; None if there is none.

    Raises: ConfigError: the end of the file could not be written.
    """
    path, _Running.path = _Running.path, None
    message = native_timeline.stop() if path is not None else ""
    if message:
        raise ConfigError(f"timeline: {path} could not be written completely. Received: {message}. Free some space.")
    return path


def leave() -> None:
    """Ends this rank's timeline when the rank leaves the job. A full disk is then only a warning."""
    try:
        stop()
    except ConfigError as error:
        stack_position.warn(str(error))


def is_on() -> bool:
    """Whether this rank writes a timeline."""
    return _Running.path is not None


def keep(capacity: int) -> None:
    _Running.keeps = capacity > 0
    native_timeline.keep(capacity)


def keeps() -> bool:
    """Whether collectives are kept in memory, for one reader at most."""
    return _Running.keeps


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Adds the duration of the body to the timeline's line of steps, if a timeline is being written."""
    if not is_on():
        yield
        return
    begin = time.monotonic()
    try:
        yield
    finally:
        add_span(name, begin)


def add_span(name: str, begin: float) -> None:
    """Adds a span from `begin` (of time.monotonic()) until now; does nothing without a timeline."""
    if is_on():
        native_timeline.span(name, begin, time.monotonic())


def path_of_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Returns "/tmp/timeline.rank3.json" for "/tmp/timeline.json" and rank 3."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")
