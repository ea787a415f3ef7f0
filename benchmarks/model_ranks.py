"""What benchmarks/validate_model.py runs on every rank: measures the links, then all-reduces over them.

Not meant to be started by hand. Rank 0 prints one JSON document behind SETTINGS["mark"].
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np
from _emulated_cluster import Cables
from cluster_ranks import SETTINGS, WORLD, make_contestant, measure, pattern
from mpi4py import MPI

import keras_ddl

SMALL = 1 << 10  # bytes of a message that shows latency
MESSAGE, WINDOW = 60 << 10, 4  # as the engine sends: messages, and how many are under way
LARGE = 8 << 20  # bytes of a unit that show bandwidth


def link(unit: int, units: int) -> dict[str, float]:
    """Latency and bandwidth along a dimension of `units` units of `unit` ranks. COLLECTIVE.

    All ranks send to their neighbour in the next unit and receive from the one before at once, as rings do.
    """
    box = unit * units
    first = WORLD.rank // box * box
    following = first + (WORLD.rank - first + unit) % box
    previous = first + (WORLD.rank - first - unit) % box
    out, incoming = np.zeros(MESSAGE, np.uint8), np.zeros((WINDOW, MESSAGE), np.uint8)

    steps = []
    WORLD.Barrier()
    for _ in range(60):
        start = time.perf_counter()
        WORLD.Sendrecv(out[:SMALL], following, recvbuf=incoming[0, :SMALL], source=previous)
        steps.append(time.perf_counter() - start)

    def stream(nbytes: int) -> float:
        WORLD.Barrier()
        start = time.perf_counter()
        under_way: list[list[MPI.Request]] = []
        for number in range(nbytes // unit // MESSAGE):
            if number >= WINDOW:
                MPI.Request.Waitall(under_way[number - WINDOW])
            receive = WORLD.Irecv(incoming[number % WINDOW], previous)
            under_way.append([receive, WORLD.Isend(out, following)])
        for requests in under_way[-WINDOW:]:
            MPI.Request.Waitall(requests)
        return WORLD.allreduce(time.perf_counter() - start, MPI.MAX)

    stream(LARGE // 4)  # opens connections, uses up what the token buckets have saved
    seconds = statistics.median(stream(LARGE) for _ in range(3))
    return {"latency": WORLD.allreduce(statistics.median(steps), MPI.MAX), "bandwidth": LARGE / seconds}


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


def start() -> float:
    """Seconds until all ranks know that all have come: the median barrier. COLLECTIVE."""
    seconds = []
    for _ in range(30):
        WORLD.Barrier()
        begin = time.perf_counter()
        keras_ddl.barrier()
        seconds.append(time.perf_counter() - begin)
    return WORLD.allreduce(statistics.median(seconds), MPI.MAX)


def main() -> None:
    keras_ddl.init("p")
    cables = Cables(SETTINGS["counters"])
    per_host = WORLD.size // SETTINGS["hosts"]
    per_rack = SETTINGS["hosts"] // SETTINGS["racks"] * per_host
    memory, begin = shared_memory(), start()
    links = [link(per_host, per_rack // per_host)]
    if SETTINGS["racks"] > 1:
        links.append(link(per_rack, SETTINGS["racks"]))
    contestants = {mode: make_contestant(mode)[1] for mode in SETTINGS["contestants"]}
    rows = []
    for nbytes in SETTINGS["sizes"]:
        source = pattern(nbytes // 4, WORLD.rank)
        runs: dict[str, list[float]] = {mode: [] for mode in contestants}
        for _ in range(SETTINGS["rounds"] + 1):
            for mode, call in contestants.items():
                seconds, _, _, right = measure(call, source, cables)
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
