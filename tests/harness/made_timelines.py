"""Writes timelines of jobs that never ran in the format of the native core, with known times for every step."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = 1_800_000_000.0  # seconds since 1970


@dataclass
class Job:
    """A job in which every rank makes these steps: input, forward, and buckets sent while backward computes the next.

    Attributes:
        input, slow_input: seconds until the batch of a rank is ready, and of rank `slow`.
        backward: seconds between buckets. wire: seconds to send a bucket.
        between: seconds between steps. noise: fraction by which all these times vary at random.
        ahead: {rank: seconds by which its host's clock is ahead}. tracing: additional seconds of the first step.
        statistics: whether forward first waits for a round of sums.
    """

    ranks: int = 4
    steps: int = 40
    input: float = 2e-3
    slow_input: float = 14e-3
    slow: int = 3
    forward: float = 10e-3
    backward: float = 5e-3
    buckets: int = 4
    wire: float = 3e-3
    between: float = 1e-3
    noise: float = 0.0
    tracing: float = 0.0
    statistics: bool = False
    per_epoch: int = 0  # steps per epoch; 0: all
    ahead: dict[int, float] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Writes path.rank0.json and so on, and returns `path`."""
        draw = random.Random(7)
        events: list[list[dict[str, Any]]] = [[] for _ in range(self.ranks)]
        for rank, own in enumerate(events):
            host = f"h{rank}" if rank in self.ahead else "h"
            names = {"name": f"rank {rank} ({host})"}
            own.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": names})
        free = [START] * self.ranks
        for step in range(self.steps):
            free = self._step(step, free, events, draw)
        for rank, own in enumerate(events):
            file = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
            file.write_text("[\n" + ",\n".join(map(json.dumps, own)) + "\n]\n", encoding="utf-8")
        return path

    def _step(self, step: int, begins: list[float], events: list[Any], draw: random.Random) -> list[float]:
        def about(seconds: float) -> float:
            return seconds * (1 + self.noise * draw.random())

        number = step % (self.per_epoch or self.steps)
        ready = [
            begin + about(self.slow_input if rank == self.slow else self.input) + (self.tracing if step == 0 else 0)
            for rank, begin in enumerate(begins)
        ]
        self._collective("rows", 64, ready, max(ready) + 1e-4, events)
        ready = [moment + about(self.forward) for moment in ready]
        prefix = "model/train_step/3f9a0c21/"
        if self.statistics:
            ready = [self._collective(f"{prefix}sum_0", 64, ready, max(ready) + self.wire, events)] * self.ranks
            prefix += "after_1/"
        free = 0.0
        for bucket in range(self.buckets):
            ready = [moment + about(self.backward) for moment in ready]
            free = max(free, *ready) + about(self.wire)
            self._collective(f"{prefix}sum_{bucket + self.statistics}", 1_000_000, ready, free, events)
        after = []
        for rank, begin in enumerate(begins):
            end = free + 5e-4
            self._event(events, rank, name=f"step {number}", cat="step", ts=begin, dur=end - begin, tid=1)
            after.append(end + about(self.between))
        return after

    def _collective(self, name: str, count: int, ready: list[float], end: float, events: list[Any]) -> float:
        for rank, moment in enumerate(ready):
            waited = max(ready) - moment
            arguments = {"bytes": count, "waited_for_ranks_us": waited * 1e6, "waited_for_turn_us": 0.0}
            start = moment + waited
            self._event(events, rank, name=name, cat="all_reduce", ts=start, dur=end - start, tid=2, args=arguments)
        return end

    def _event(self, events: list[Any], rank: int, *, ts: float, dur: float, **more: Any) -> None:
        moment = (ts + self.ahead.get(rank, 0.0)) * 1e6
        events[rank].append({"ph": "X", "pid": rank, "ts": round(moment, 3), "dur": round(dur * 1e6, 3), **more})
