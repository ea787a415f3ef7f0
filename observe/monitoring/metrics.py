"""Holds the state of a job as Prometheus metrics (`keras-ddl run --metrics-port`), which docs/monitoring.md lists.

The launcher's loop changes the state; a thread of the server (metrics_server.py) collects it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from keras_ddl import config

_PREFIX = "keras_ddl_"
_MOST_LOGS = 200  # limits programs that keep inventing names
_NAME_CHARACTERS = 100
# Figure of figures.py -> (metric, help).
_TOTALS = {
    "steps": ("steps", "Training steps: batches of fit, and calls of strategy.function."),
    "rows": ("rows", "Rows of these steps, of all ranks together."),
    "exposed": (
        "exposed_communication_seconds",
        "Seconds in which the first rank only waited for collectives, estimated from one step a second.",
    ),
}


class _Total:
    """A counter that the first rank reports. All ranks count the same steps from 0, except ranks that joined later."""

    def __init__(self) -> None:
        self.value = 0.0
        self.is_known = False
        self._before = 0.0  # total at the start of the attempt
        self._rank: int | None = None
        self._offset = 0.0

    def begin_attempt(self) -> None:
        self._before, self._rank = self.value, None

    def report(self, rank: int, value: float) -> None:
        self.is_known = True
        own = self.value - self._before
        if rank != self._rank:
            self._rank, self._offset = rank, 0.0 if value >= own else own - value
        self.value = max(self.value, self._before + self._offset + value)


class Metrics:
    """The metrics of one job: a watcher, and a collector for a prometheus_client registry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.time()
        self._starter = ""
        self._expected = 0
        self._members: set[int] = set()
        self._hosts: dict[int, str] = {}  # hosts of ranks whose programs have started in this attempt
        self._up: set[int] = set()
        self._counts = dict.fromkeys(("restarts", "lost_ranks", "joined_ranks", "checkpoints"), 0)
        self._checkpoint: tuple[float, int] | None = None  # (when the launcher heard of it, its step)
        self._totals = {name: _Total() for name in _TOTALS}
        self._reporter: int | None = None  # the rank whose figures are shown
        self._reported: tuple[float, float | None] = (0.0, None)  # when; the epoch
        self._logs: dict[str, float] = {}

    # ---- the launcher's loop -------------------------------------------------------------------------------------

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Takes an event of watchers.py."""
        with self._lock:
            rank = int(fields.get("rank", -1))
            if name == "start":
                self._begin_attempt(fields)
            elif name == "restart":
                self._counts["restarts"] += 1
            elif name == "rank_start":
                self._hosts[rank] = fields["host"]
                self._up.add(rank)
            elif name == "rank_end":
                self._up.discard(rank)
                self._counts["lost_ranks"] += bool(fields["lost"])
                self._forget_figures_of(rank)
            elif name in ("rank_lost", "rank_left"):
                self._members.discard(rank)
                self._forget_figures_of(rank)
                if name == "rank_left":
                    self._expected -= 1
            elif name == "rank_joined":
                self._members.add(rank)
                self._expected = max(self._expected, len(self._members))
                self._counts["joined_ranks"] += 1
            elif name == "checkpoint":
                self._counts["checkpoints"] += 1
                self._checkpoint = time.time(), int(fields["step"])

    def figures(self, rank: int, figures: Mapping[str, Any]) -> None:
        """Takes the figures of the first rank, without values that are not numbers."""
        with self._lock:
            for name, total in self._totals.items():
                if (value := _number(figures.get(name))) is not None:
                    total.report(rank, value)
            logs = figures.get("logs")
            some = list(logs.items())[:_MOST_LOGS] if isinstance(logs, dict) else []
            numbers = {name[:_NAME_CHARACTERS]: _number(value) for name, value in some}
            self._reporter = rank
            self._logs = {name: value for name, value in numbers.items() if value is not None}
            self._reported = time.time(), _number(figures.get("epoch"))

    def _begin_attempt(self, fields: Mapping[str, Any]) -> None:
        self._starter, self._expected = fields["starter"], fields["ranks"]
        self._members = set(range(self._expected))
        self._hosts.clear()
        self._up.clear()
        for total in self._totals.values():
            total.begin_attempt()
        if self._reporter is not None:
            self._forget_figures_of(self._reporter)

    def _forget_figures_of(self, rank: int) -> None:
        if rank == self._reporter:
            self._reporter, self._logs = None, {}

    # ---- the server's threads ------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(self._collected())

    def _collected(self) -> Iterable[Metric]:
        """Yields all metrics of the job. The caller holds the lock."""
        info = _gauge("job_info", "The version of keras_ddl, and the starter of the ranks.", ["version", "starter"])
        info.add_metric([config.version(), self._starter], 1)
        yield info
        yield _gauge("job_start_time_seconds", "When the job began, in seconds since 1970.", value=self._began)
        yield _gauge("ranks_expected", "Ranks that the job should have.", value=self._expected)
        alive = len(self._members & self._up)
        yield _gauge("ranks_alive", "Ranks whose programs are running.", value=alive)
        up = _gauge("rank_up", "1: the rank's program is running; 0: it has ended.", ["rank", "host"])
        for rank, host in sorted(self._hosts.items()):
            up.add_metric([str(rank), host], rank in self._up)
        yield up
        yield _counter("restarts", "How often all ranks were started again.", self._counts["restarts"])
        text = "Ranks that were killed, or lost with their host."
        yield _counter("lost_ranks", text, self._counts["lost_ranks"])
        yield _counter("joined_ranks", "Ranks that joined the running job.", self._counts["joined_ranks"])
        yield _counter("checkpoints", "Complete checkpoints of callbacks.Checkpoint.", self._counts["checkpoints"])
        if self._checkpoint is not None:
            when, step = self._checkpoint
            text = "When the launcher heard of the last complete checkpoint, in seconds since 1970."
            yield _gauge("last_checkpoint_timestamp_seconds", text, value=when)
            age = max(0.0, time.time() - when)
            yield _gauge("last_checkpoint_age_seconds", "Seconds since the last complete checkpoint.", value=age)
            yield _gauge("last_checkpoint_step", "The optimizer step of the last complete checkpoint.", value=step)
        for name, (metric, text) in _TOTALS.items():
            if self._totals[name].is_known:
                yield _counter(metric, text, self._totals[name].value)
        if self._reporter is not None:
            when, epoch = self._reported
            text = "When the last figures of the training arrived, in seconds since 1970."
            yield _gauge("last_figures_timestamp_seconds", text, value=when)
            if epoch is not None:
                yield _gauge("epoch", "The current epoch of fit, from 0.", value=epoch)
            logs = _gauge("log", "The newest logs of fit, as its progress bar shows them.", ["name"])
            for name, value in self._logs.items():
                logs.add_metric([name], value)
            yield logs


def _gauge(name: str, text: str, labels: list[str] | None = None, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value=value, labels=labels)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, text, value=value)


def _number(value: object) -> float | None:
    """Returns a number, which may be NaN or infinite like a loss; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
