"""When each collective was submitted, agreed on, run and done, as a picture for chrome://tracing and Perfetto.

KERAS_DDL_TIMELINE=/tmp/timeline.json makes every rank write one from `init` to its end: rank 0 to
/tmp/timeline.rank0.json, and so on. `start` and `stop` do the same for a part of a program, and `merge` puts the ranks'
files together. Each rank is a process of the picture, with a line for steps (made by `span`; a Strategy makes one for
each step of fit) and one for the collectives, above which each collective's waiting is shown. Costs about two
microseconds per collective, and nothing when no timeline is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl import _native, communicator
from keras_ddl.errors import ConfigError


@dataclass(frozen=True)
class Collective:
    """One collective on one rank. Times in seconds since 1970, by the clock of the rank's host."""

    rank: int
    kind: str
    name: str
    bytes: int
    submitted: float  # this rank had it ready
    agreed: float  # all ranks had
    started: float  # the communication thread had done what came before
    finished: float


class _Running:
    path: Path | None = None


def start(path: str | os.PathLike[str]) -> Path:
    """Begins this rank's timeline and returns its file: `path` with .rankN before its suffix. Not collective.

    Raises: ConfigError: one is being written already, or the file cannot be made.
    """
    topology = communicator.topology()
    own = path_of_rank(path, topology.rank)
    label = f"rank {topology.rank} ({socket.gethostname()})"
    message = _native.trace_start(str(own), topology.rank, label)
    if message:
        raise ConfigError(
            f"timeline: the file must be one that can be written, and no other may be open. Received: {message} (rank "
            f"{topology.rank}). Call keras_ddl.timeline.stop() first, or name a folder that exists on every host."
        )
    _Running.path = own
    return own


def stop() -> Path | None:
    """Ends this rank's timeline and returns its file; None if there is none. Runs by itself in `shutdown`."""
    path, _Running.path = _Running.path, None
    message = _native.trace_stop() if path is not None else ""
    if message:
        raise ConfigError(f"timeline: {path} could not be written to its end. Received: {message}. Free some space.")
    return path


def is_on() -> bool:
    """Whether this rank writes a timeline."""
    return _Running.path is not None


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Marks what the body does on the line of the steps, if a timeline is being written."""
    if not is_on():
        yield
        return
    begin = time.monotonic()
    try:
        yield
    finally:
        add_span(name, begin)


def add_span(name: str, begin: float) -> None:
    """Marks what has gone on from `begin` (of time.monotonic()) until now; does nothing without a timeline."""
    if is_on():
        _native.trace_span(name, begin, time.monotonic())


def path_of_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Returns "/tmp/timeline.rank3.json" for "/tmp/timeline.json" and rank 3."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def merge(path: str | os.PathLike[str]) -> Path:
    """Writes to `path` what the ranks' files beside it hold, all ranks in one picture. Call it when they have ended.

    Raises: ConfigError: there are no files of ranks.
    """
    path = Path(path)
    pattern = re.compile(re.escape(path.stem) + r"\.rank\d+" + re.escape(path.suffix or ".json"))
    parts = sorted(part for part in path.parent.glob("*") if pattern.fullmatch(part.name))
    if not parts:
        raise ConfigError(
            f"timeline: there must be files of ranks to merge. Received: none like {path_of_rank(path, 0)}. Give the "
            "path that KERAS_DDL_TIMELINE or timeline.start had; files of other hosts must be copied here first."
        )
    events = [event for part in parts for event in read(part)]
    path.write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n", encoding="utf-8")
    return path


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the events of a timeline file, also of one whose process was killed."""
    text = Path(path).read_text(encoding="utf-8").rstrip()
    if not text.endswith("\n]"):
        text = text[: text.rfind("}") + 1] + "\n]" if "}" in text else "[]"
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # the last line was cut in the middle
        return json.loads(text[: text.rfind("},\n") + 1] + "\n]")


def collectives(path: str | os.PathLike[str]) -> list[Collective]:
    """Returns the collectives of a timeline file (of one rank, or merged) in the order in which they started."""
    found = []
    for event in read(path):
        arguments = event.get("args", {})
        if event["ph"] == "X" and "bytes" in arguments:
            started = event["ts"] * 1e-6
            agreed = started - arguments["waited_for_turn_us"] * 1e-6
            submitted = agreed - arguments["waited_for_ranks_us"] * 1e-6
            finished = started + event["dur"] * 1e-6
            found.append(
                Collective(
                    event["pid"], event["cat"], event["name"], arguments["bytes"], submitted, agreed, started, finished
                )
            )
    return sorted(found, key=lambda one: one.started)
