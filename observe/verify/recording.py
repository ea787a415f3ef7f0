"""Stores a run of a program for a comparison: events, each with its arrays, in the folder of a rank.

An event is a training step, the end of an epoch or of an evaluation, or a prediction. Its arrays (weights, optimizer
slots, logs, outputs) are in `000012.npz`, its other facts in a line of `events.jsonl`. Large models would fill a disk:
if an event has more than FULL_ENTRIES entries, its arrays of more than SKETCH_ENTRIES are stored as a linear sketch.
This module needs only NumPy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FULL_ENTRIES = 1 << 22
SKETCH_ENTRIES = 1 << 12
PLAN_FILE, FACTS_FILE, EVENTS_FILE = "plan.json", "facts.json", "events.jsonl"
STARTED_FILE = "started"  # made in a run's folder when the program imports the Strategy


@dataclass(frozen=True)
class Plan:
    """The settings for recording a run.

    Attributes:
        steps: training steps to record; the program is ended before the next one begins.
        floatx: Keras's default dtype to set; "": leave it.
        seed: seed of Python, NumPy and TensorFlow, set before the program begins.
        last_bit: change each weight by one unit in its last place before training.
    """

    steps: int
    floatx: str = ""
    seed: int = 0
    last_bit: bool = False

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        return cls(**json.loads((folder / PLAN_FILE).read_text(encoding="utf-8")))


@dataclass
class Event:
    """One event, without its arrays.

    Attributes:
        kind: "step" | "epoch" | "prediction".
        of: the model, or the function of `Strategy.function`.
        step: number of training steps that have ended.
        kinds: name of an array -> its kind: "weights", "momentum", "logs", ...
        scales: name -> the largest magnitude of its entries.
        rows: name -> number of the array's entries in each entry of the sketch.
        digest: digest of all arrays in full, to compare ranks.
    """

    number: int
    kind: str
    of: str
    step: int
    kinds: dict[str, str] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    digest: str = ""

    @property
    def label(self) -> str:
        """A description for messages, which must be the same in all runs."""
        what = {"step": "training step", "epoch": "logs of an epoch or evaluation", "prediction": "prediction"}
        return f"{what.get(self.kind, self.kind)} of {self.of}"


class Writer:
    """Writes the events of one rank. is_first: the rank is rank 0, the only one that stores arrays."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._is_first = folder / f"rank-{rank}", rank == 0
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number = 0

    def add(self, event: Event, arrays: Mapping[str, np.ndarray]) -> None:
        """Stores an event with its arrays, and sets the event's facts about them."""
        event.number, self._number = self._number, self._number + 1
        digest = hashlib.sha256()
        for name in sorted(arrays):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(arrays[name]).tobytes())
        event.digest = digest.hexdigest()
        if self._is_first:
            is_full = sum(each.size for each in arrays.values()) <= FULL_ENTRIES
            stored = {}
            for name, array in arrays.items():
                event.scales[name] = magnitude(array)
                stored[name], event.rows[name] = (array, 1) if is_full else sketch(array)
            named: dict[str, Any] = {f"a{i}": each for i, each in enumerate(stored.values())}
            np.savez(self._folder / f"{event.number:06}.npz", **named)
        with (self._folder / EVENTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(event)) + "\n")

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Stores facts about the run, replacing earlier ones."""
        new = self._folder / (FACTS_FILE + ".new")
        new.write_text(json.dumps(facts), encoding="utf-8")
        new.replace(self._folder / FACTS_FILE)


class Recording:
    """The recording of all ranks of a run in a folder. An event whose process died while it wrote is left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "rank-0"
        self.events = _events(self._folder)
        others = {int(other.name.partition("-")[2]): other for other in folder.glob("rank-[1-9]*")}
        self._digests = {rank: [each.digest for each in _events(others[rank])] for rank in sorted(others)}
        path = self._folder / FACTS_FILE
        self.facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @property
    def steps(self) -> int:
        return sum(each.kind == "step" for each in self.events)

    def arrays(self, event: Event) -> dict[str, np.ndarray]:
        """Returns the arrays of an event, or their sketches, by name."""
        with np.load(self._folder / f"{event.number:06}.npz") as file:
            return {name: file[f"a{i}"] for i, name in enumerate(event.scales)}

    def ranks_differ(self, num_ranks: int) -> str:
        """Returns where a rank first has other bits than rank 0, or records less or more; "": all are equal.

        num_ranks: number of ranks that should have recorded. Predictions differ by rank, so only their number counts.
        """
        for event in self.events:
            for rank, digests in self._digests.items():
                other = digests[event.number] if event.number < len(digests) else event.digest
                if event.kind != "prediction" and event.digest != other:
                    return f"rank {rank} after step {event.step} ({event.label})"
        for rank, digests in self._digests.items():
            if digests and len(digests) != len(self.events):
                return f"rank {rank} recorded {len(digests)} events, rank 0 {len(self.events)}"
        recorded = bool(self.events) + sum(map(bool, self._digests.values()))
        return "" if recorded == num_ranks else f"only {recorded} of {num_ranks} ranks recorded anything"


def _events(folder: Path) -> list[Event]:
    return list(_read_lines(folder / EVENTS_FILE))


def _read_lines(path: Path) -> Iterator[Event]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield Event(**json.loads(line))
        except ValueError:  # truncated
            return


def magnitude(array: np.ndarray) -> float:
    """Returns the largest finite magnitude of an array's entries; 0 without any."""
    if array.dtype.kind not in "fiub" or not array.size:
        return 0.0
    values = np.abs(array.astype(np.float64))
    return float(np.max(values, where=np.isfinite(values), initial=0.0))


def sketch(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns sums of an array's entries with fixed signs, each entry in one sum, and the number of entries in a sum.

    If all n entries of a sum differ by rounding, the sum differs by about sqrt(n) times as much. If one entry differs,
    the sum differs by as much as this entry.
    """
    if array.size <= SKETCH_ENTRIES or array.dtype.kind not in "fiub":
        return array, 1
    rows = math.ceil(array.size / SKETCH_ENTRIES)
    signs = np.where(np.random.Generator(np.random.Philox(12345)).integers(0, 2, rows), 1.0, -1.0)
    flat = np.zeros(rows * SKETCH_ENTRIES)
    flat[: array.size] = array.reshape(-1)
    return signs @ flat.reshape(rows, SKETCH_ENTRIES), rows
