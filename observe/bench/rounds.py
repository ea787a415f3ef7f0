"""Measures in interleaved rounds, for `keras-ddl bench` and the programs in benchmarks/.

The cores of a virtual machine change place and speed from minute to minute, so a single time means nothing. Each round
measures every contestant once, one after the other. The result is the median over the rounds of the slowest rank's
time, and ratios between contestants in the same rounds.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import keras_ddl
from keras_ddl.cli.info import cpu_model
from keras_ddl.communicator.transports import mpi


def slowest_rank(seconds: float) -> float:
    """Returns the largest of the ranks' times, on every rank. COLLECTIVE."""
    return max(keras_ddl.all_gather_object(seconds))


def interleave(
    contestants: dict[str, Callable[[], object]], rounds: int, repeat: int, warmup: int = 1
) -> dict[str, float]:
    """Returns the median seconds per call of each contestant. COLLECTIVE.

    Args:
        contestants: name -> function, collective or not; the same names in the same order on all ranks.
        rounds: turns of each contestant.
        repeat: calls per turn.
        warmup: calls of each before the first turn, for first-time allocations and page faults.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        for _ in range(warmup):
            call()
    for _ in range(rounds):
        for name, call in contestants.items():
            # MPI's barrier, if available: all ranks spin in it, so they start at the same time.
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
    """Returns one line about the machine, for the head of a table."""
    return f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, {keras_ddl.size()} ranks"
