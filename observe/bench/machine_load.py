"""Measures whether other programs or virtual machines use the cores of a benchmark.

It reads /proc/stat, which shows the whole host even in a container.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_SECONDS = 0.5
# Larger shares of all cores disturb a measurement.
_OTHERS, _STOLEN = 0.1, 0.02


@dataclass(frozen=True)
class Load:
    """Core seconds that other programs (`others`) and virtual machines (`stolen`) took from a host in `seconds`."""

    seconds: float
    cores: int
    others: float
    stolen: float

    def warning(self, when: str) -> str:
        """Returns a sentence about a busy machine; "" for a quiet one. `when`: when it was measured."""
        room = self.seconds * self.cores
        found = []
        if self.others > _OTHERS * room:
            found.append(f"other programs took {self.others / self.seconds:.1f} of its {self.cores} cores")
        if self.stolen > _STOLEN * room:
            found.append(f"other virtual machines took {self.stolen / room:.0%} of its time (steal)")
        if not found:
            return ""
        return f"this machine is busy: {' and '.join(found)} ({when}; /proc/stat). Trust ratios more than times."


class Watch:
    """Measures the load of this host from its construction to `load`."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._begin, self._busy, self._stolen = time.monotonic(), *_busy_and_stolen(stat)

    def load(self, own_seconds: float) -> Load:
        """Returns the load. `own_seconds`: CPU time that the benchmark itself took on this host in this time."""
        seconds = max(time.monotonic() - self._begin, 1e-3)
        busy, stolen = _busy_and_stolen(self._stat)
        return Load(seconds, os.cpu_count() or 1, max(0.0, busy - self._busy - own_seconds), stolen - self._stolen)


def _busy_and_stolen(stat: Path) -> tuple[float, float]:
    """Returns the core seconds that programs used, and that were stolen, since the host started; 0: unknown.

    Source: proc(5): user, nice, system, idle, iowait, irq, softirq, steal; user and nice include guests.
    """
    try:
        fields = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    if len(fields) < 8:
        return 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq) / tick, steal / tick


def own_seconds() -> float:
    """Returns the CPU time of this process and of its ended descendants."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def before() -> str:
    """Returns a sentence if the machine is busy before the measurement, else "". Takes half a second."""
    watch, own = Watch(), own_seconds()
    time.sleep(_SAMPLE_SECONDS)
    return watch.load(own_seconds() - own).warning(f"in {_SAMPLE_SECONDS} s before the ranks started")
