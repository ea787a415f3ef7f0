"""What benchmarks/validate_model.py runs on every rank: measures the links, then all-reduces over them.

Not meant to be started by hand. Rank 0 prints one JSON document behind SETTINGS["mark"].
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from _emulated_cluster import Cables
from cluster_ranks import SETTINGS, WORLD, make_contestant, measure, pattern
from mpi4py import MPI

import keras_ddl

SMALL = 1 << 10  # bytes of messages that show latency
MESSAGE, WINDOW = 60 << 10, 4  # as the engine sends: messages, and how many are under way
LARGE = 8 << 20  # bytes of a unit that show bandwidth
BURST = 1 << 20  # bytes that use up what the buckets of the shaped links have saved, which a plain link does not have


def stream(unit: int, units: int, nbytes: int) -> float:
    """Seconds of sending `nbytes` from each unit to the next along a dimension of `units` units of `unit` ranks.

    COLLECTIVE. All ranks send to their neighbour in the next unit and receive from the one before at once, as rings do.
    """
    box = unit * units
    first = WORLD.rank // box * box
    following = first + (WORLD.rank - first + unit) % box
    previous = first + (WORLD.rank - first - unit) % box
    out, incoming = np.zeros(MESSAGE, np.uint8), np.zeros((WINDOW, MESSAGE), np.uint8)
    WORLD.Barrier()
    begin = time.perf_counter()
    under_way: list[list[MPI.Request]] = []
    for number in range(nbytes // unit // MESSAGE):
        if number >= WINDOW:
            MPI.Request.Waitall(under_way[number - WINDOW])
        receive = WORLD.Irecv(incoming[number % WINDOW], previous)
        under_way.append([receive, WORLD.Isend(out, following)])
    for requests in under_way[-WINDOW:]:
        MPI.Request.Waitall(requests)
    return WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)


def link(unit: int, units: int) -> dict[str, float]:
    """Latency and bandwidth along a dimension of `units` units of `unit` ranks. COLLECTIVE."""
    stream(unit, units, BURST)  # opens connections
    seconds = statistics.median(stream(unit, units, LARGE) for _ in range(3))
    box = unit * units
    ring = keras_ddl.split(WORLD.rank // box * box + WORLD.rank % unit)
    latency = max(0.0, small_all_reduce(ring) - start(ring)) / (2 * (units - 1))
    ring.close()
    return {"latency": latency, "bandwidth": LARGE // unit // MESSAGE * MESSAGE * unit / seconds}


def small_all_reduce(comm: keras_ddl.Communicator) -> float:
    """Median seconds of an all-reduce with messages of `SMALL` bytes. COLLECTIVE over all ranks.

    The engine looks after its messages now and then, so that other threads have the core: a step takes it longer than a
    program that does nothing but wait.
    """
    source = np.ones(SMALL // 4 * comm.size, np.float32)
    return median_of(lambda: comm.all_reduce_array(source))


def shared_memory() -> float:
    """busbw of all-reduces inside the hosts, all hosts at once, which share this machine's cores. COLLECTIVE."""
    local = keras_ddl.split(keras_ddl.topology().hosts[WORLD.rank])
    if local.size == 1:
        return 1e12
    source = np.ones(LARGE // 4, np.float32)
    result = np.empty_like(source)
    seconds = []
    for _ in range(30):  # in the first 25 the engine tries its schemes
        WORLD.Barrier()
        begin = time.perf_counter()
        local.all_reduce_array(source, out=result)
        seconds.append(WORLD.allreduce(time.perf_counter() - begin, MPI.MAX))
    local.close()
    return 2 * (local.size - 1) / local.size * LARGE / statistics.median(seconds[25:])


def start(comm: keras_ddl.Communicator | None = None) -> float:
    """Seconds until the ranks of `comm` know that all of them have come: the median barrier. COLLECTIVE."""
    return median_of(lambda: keras_ddl.barrier(comm=comm))


def median_of(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(60):
        WORLD.Barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return WORLD.allreduce(statistics.median(seconds), MPI.MAX)


def main() -> None:
    keras_ddl.init("p")
    cables = Cables(SETTINGS["counters"])
    per_host = WORLD.size // SETTINGS["hosts"]
    per_rack = SETTINGS["hosts"] // SETTINGS["racks"] * per_host
    memory, begin = shared_memory(), start()
    dimensions = [(per_host, per_rack // per_host), (per_rack, SETTINGS["racks"])]
    dimensions = [(unit, units) for unit, units in dimensions if units > 1]
    links = [link(*dimension) for dimension in dimensions]

    def use_up_bursts() -> None:
        for dimension in dimensions:
            stream(*dimension, BURST)

    contestants = {mode: make_contestant(mode)[1] for mode in SETTINGS["contestants"]}
    rows = []
    for nbytes in SETTINGS["sizes"]:
        source = pattern(nbytes // 4, WORLD.rank)
        runs: dict[str, list[float]] = {mode: [] for mode in contestants}
        for _ in range(SETTINGS["rounds"] + 1):
            for mode, call in contestants.items():
                seconds, _, _, right = measure(call, source, cables, use_up_bursts)
                assert right, f"{mode}: a wrong sum"
                runs[mode].append(seconds)
        # The first of each opens connections and touches memory.
        rows += [{"mode": m, "bytes": source.nbytes, "seconds": statistics.median(s[1:])} for m, s in runs.items()]
    if WORLD.rank == 0:
        print(
            SETTINGS["mark"] + json.dumps({"memory": memory, "start": begin, "links": links, "rows": rows}), flush=True
        )


if __name__ == "__main__":
    main()
