"""Finds, merges and reads timeline files."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.communicator.recording import path_of_rank
from keras_ddl.communicator.step_names import Role, role_of
from keras_ddl.errors import ConfigError


@dataclass(frozen=True)
class Collective:
    """One collective on one rank.

    Times are seconds since 1970 by the clock of the rank's host; from `take`, seconds of time.monotonic().

    Attributes:
        kind: such as "all_reduce".
        role: its purpose.
        bytes: size of this rank's input.
        submitted: when its input was ready on this rank.
        agreed: when it was ready on all ranks.
        started: when the communication thread had finished the collectives before it.
        finished: when its result was ready.
    """

    rank: int
    kind: str
    name: str
    bytes: int
    submitted: float
    agreed: float
    started: float
    finished: float

    @functools.cached_property
    def role(self) -> Role:
        return role_of(self.name)


def paths_of_ranks(path: Path) -> list[Path]:
    """Returns the ranks' files in the folder of `path`, named as by `path_of_rank`."""
    pattern = re.compile(re.escape(path.stem) + r"\.rank\d+" + re.escape(path.suffix or ".json"))
    return sorted(part for part in path.parent.glob("*") if pattern.fullmatch(part.name))


def merge(path: str | os.PathLike[str]) -> Path:
    """Merges the ranks' files in the folder of `path` into `path`. Call it when all ranks have ended.

    Raises: ConfigError: there are no files of ranks.
    """
    path = Path(path)
    parts = paths_of_ranks(path)
    if not parts:
        raise ConfigError(
            f"timeline: there must be files of ranks to merge. Received: none like {path_of_rank(path, 0)}. Use the "
            "path of KERAS_DDL_TIMELINE or timeline.start; files of other hosts must be copied here first."
        )
    events = [event for part in parts for event in read(part)]
    path.write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n", encoding="utf-8")
    return path


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the events of a timeline file, even if its process was killed."""
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
    """Returns the collectives, as `collectives` does, from the events that `read` returns."""
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
