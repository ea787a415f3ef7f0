"""Interleaved rounds: how `keras-ddl bench` and every program in benchmarks/ measures.

The cores of a virtual machine change their distance and their speed from minute to minute, so a time alone means
nothing. Each round measures every contestant once, one after the other; what is reported is the median over the rounds
of the slowest rank's time, and ratios between contestants of the same rounds.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import keras_ddl
from keras_ddl.communicator import mpi


def slowest_rank(seconds: float) -> float:
    """The largest of the ranks' times, on every rank."""
    return max(keras_ddl.all_gather_object(seconds))


def interleave(
    contestants: dict[str, Callable[[], object]], rounds: int, repeat: int, warmup: int = 1
) -> dict[str, float]:
    """Median seconds per call of each contestant. COLLECTIVE.

    Args:
        contestants: name -> a call, collective or not; all ranks give the same names in the same order.
        rounds: how often each contestant takes its turn.
        repeat: calls per turn.
        warmup: calls of each before the first turn, for first touches of memory and first-time allocations.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        for _ in range(warmup):
            call()
    for _ in range(rounds):
        for name, call in contestants.items():
            # MPI's barrier, where there is one: it leaves all ranks spinning, hence equally awake.
            if mpi.running():
                from mpi4py import MPI

                MPI.COMM_WORLD.Barrier()
            else:
                keras_ddl.barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            times[name].append(slowest_rank((time.perf_counter() - start) / repeat))
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> str:
    """One line about where this runs, for the head of a table."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].split(":", 1)[1].strip() if names else platform.machine()
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, {keras_ddl.size()} ranks"
