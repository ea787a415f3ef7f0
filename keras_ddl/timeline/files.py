"""Files of timelines: which there are of a job, and the collectives in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.communicator.recording import path_of_rank
from keras_ddl.errors import ConfigError


@dataclass(frozen=True)
class Collective:
    """One collective on one rank. Times in seconds since 1970, by the clock of the rank's host; those that `take`
    returns in seconds of time.monotonic().

    Attributes:
        kind: as in "all_reduce".
        bytes: of this rank's input.
        submitted: this rank had it ready.
        agreed: all ranks had.
        started: the communication thread had done what came before.
        finished: its result was there.
    """

    rank: int
    kind: str
    name: str
    bytes: int
    submitted: float
    agreed: float
    started: float
    finished: float


def paths_of_ranks(path: Path) -> list[Path]:
    """Returns the files of ranks that lie beside `path`, as `path_of_rank` names them."""
    pattern = re.compile(re.escape(path.stem) + r"\.rank\d+" + re.escape(path.suffix or ".json"))
    return sorted(part for part in path.parent.glob("*") if pattern.fullmatch(part.name))


def merge(path: str | os.PathLike[str]) -> Path:
    """Writes to `path` what the ranks' files beside it hold, all ranks in one picture. Call it when they have ended.

    Raises: ConfigError: there are no files of ranks.
    """
    path = Path(path)
    parts = paths_of_ranks(path)
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
    events: list[dict[str, Any]]
    try:
        events = json.loads(text)
    except json.JSONDecodeError:  # the last line was cut in the middle
        events = json.loads(text[: text.rfind("},\n") + 1] + "\n]")
    return events


def collectives(path: str | os.PathLike[str]) -> list[Collective]:
    """Returns the collectives of a timeline file (of one rank, or merged) in the order in which they started."""
    return collectives_of(read(path))


def collectives_of(events: Iterable[dict[str, Any]]) -> list[Collective]:
    """As `collectives`, of events that `read` has returned."""
    result = []
    for event in events:
        arguments = event.get("args", {})
        if event["ph"] == "X" and "bytes" in arguments:
            started = event["ts"] * 1e-6
            agreed = started - arguments["waited_for_turn_us"] * 1e-6
            submitted = agreed - arguments["waited_for_ranks_us"] * 1e-6
            finished = started + event["dur"] * 1e-6
            result.append(
                Collective(
                    event["pid"], event["cat"], event["name"], arguments["bytes"], submitted, agreed, started, finished
                )
            )
    return sorted(result, key=lambda one: one.started)
