"""The program that benchmarks/validate_model.py runs on every rank. It measures the links, then all-reduces over them.

Rank 0 prints a JSON document after SETTINGS["mark"].
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from _cluster_ranks import SETTINGS, WORLD, make_communicator, measure, pattern
from _emulated_cluster import Cables
from mpi4py import MPI

import keras_ddl
from keras_ddl.communicator.native import binding

SMALL = 1 << 10  # bytes of a message to measure latency
MESSAGE, WINDOW = 60 << 10, 4  # the engine's bytes per message and messages in flight
LARGE = 8 << 20  # bytes per unit to measure bandwidth
BURST = 1 << 20  # bytes that use up the burst of a shaped link, which a plain link does not have


def stream(unit: int, units: int, nbytes: int) -> float:
    """Returns the seconds to send `nbytes` from each unit to the next in a dimension of `units` units of `unit` ranks.

    COLLECTIVE. As in a ring, each rank sends to its neighbour in the next unit while it receives from the previous one.
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


def bandwidth(unit: int, units: int) -> float:
    """Returns bytes/s along a dimension of `units` units of `unit` ranks. COLLECTIVE."""
    stream(unit, units, BURST)  # opens connections
    seconds = statistics.median(stream(unit, units, LARGE) for _ in range(3))
    return LARGE // unit // MESSAGE * MESSAGE * unit / seconds


def latency(ring: binding.NativeCommunicator) -> float:
    """Returns the seconds of a step of the ring through all ranks with `SMALL` bytes. COLLECTIVE.

    The engine's ring is measured because it leaves the core to other threads between its polls, so that a step takes it
    longer than a program that only waits.
    """
    source = np.ones(SMALL // 4 * WORLD.size, np.float32)
    result = np.empty_like(source)
    together = median_of(lambda: ring.all_reduce(source, "sum", "step", out=result))
    return max(0.0, together - median_of(lambda: ring.barrier("start"))) / (2 * (WORLD.size - 1))


def shared_memory() -> float:
    """Returns busbw of all-reduces inside all hosts at once, because they share this machine's cores. COLLECTIVE."""
    local = keras_ddl.split(keras_ddl.topology().hosts[WORLD.rank])
    if local.size == 1:
        return 1e12
    source = np.ones(LARGE // 4, np.float32)
    result = np.empty_like(source)
    seconds = []
    for _ in range(30):  # the engine tries its schemes in the first 25
        WORLD.Barrier()
        begin = time.perf_counter()
        local.all_reduce_array(source, out=result)
        seconds.append(WORLD.allreduce(time.perf_counter() - begin, MPI.MAX))
    local.close()
    return 2 * (local.size - 1) / local.size * LARGE / statistics.median(seconds[25:])


def start() -> float:
    """Returns the median seconds of a barrier. COLLECTIVE."""
    return median_of(keras_ddl.barrier)


def median_of(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(60):
        time.sleep(2e-3)
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
    communicators = {mode: make_communicator(mode) for mode in SETTINGS["contestants"]}
    step = latency(communicators[f"x:1x{WORLD.size}"])
    links = [{"latency": step, "bandwidth": bandwidth(*dimension)} for dimension in dimensions]

    def use_up_bursts() -> None:
        for dimension in dimensions:
            stream(*dimension, BURST)

    rows = []
    for nbytes in SETTINGS["sizes"]:
        source = pattern(nbytes // 4, WORLD.rank)
        runs: dict[str, list[float]] = {mode: [] for mode in communicators}
        for _ in range(SETTINGS["rounds"] + 1):
            for mode, comm in communicators.items():
                seconds, _, _, right = measure(
                    lambda source, result, comm=comm: comm.all_reduce(source, "sum", "model", out=result),
                    source,
                    cables,
                    use_up_bursts,
                )
                assert right, f"{mode}: wrong sum"
                runs[mode].append(seconds)
        # The first of each opens connections and touches memory.
        rows += [{"mode": m, "bytes": source.nbytes, "seconds": statistics.median(s[1:])} for m, s in runs.items()]
    if WORLD.rank == 0:
        print(
            SETTINGS["mark"] + json.dumps({"memory": memory, "start": begin, "links": links, "rows": rows}), flush=True
        )


if __name__ == "__main__":
    main()
