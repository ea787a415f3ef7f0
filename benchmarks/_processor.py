"""Measures the processor time of a rank's threads, during communication and otherwise."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NamedTuple

_COMMUNICATION = "keras_ddl"  # the name of the engine's threads


class Processor(NamedTuple):
    """Seconds that the threads of this process have run so far, and that they were ready to run without a core."""

    communication: float
    others: float
    queued: float

    @classmethod
    def now(cls) -> Processor:
        """Reads the kernel's counters (Documentation/scheduler/sched-stats.rst: nanoseconds run, and waited to run)."""
        communication = queued = 0.0
        for task in Path("/proc/self/task").iterdir():
            try:
                ran, waited, _ = (int(each) * 1e-9 for each in (task / "schedstat").read_text().split())
                name = (task / "comm").read_text().strip()
            except OSError:  # the thread has ended
                continue
            queued += waited
            communication += ran if name == _COMMUNICATION else 0.0
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(communication, usage.ru_utime + usage.ru_stime - communication, queued)

    def since(self, before: Processor, parts: int) -> Processor:
        """Returns the difference since `before`, divided by `parts`."""
        return Processor(*((now - then) / parts for now, then in zip(self, before)))
