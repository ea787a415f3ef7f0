"""The program that benchmarks/cluster.py runs on every rank.

It times collectives in interleaved rounds, and counts the bytes that hosts send.

Its argument is a JSON document of settings. Rank 0 prints a JSON document after SETTINGS["mark"].
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _emulated_cluster import Cables
from _halves import by_keras_ddl, by_mpi, chunk_of
from _rounds import machine
from _tcp_streams import TcpStreams
from mpi4py import MPI

import keras_ddl
from keras_ddl.communicator import describe, group
from keras_ddl.communicator.native import binding
from keras_ddl.communicator.transports import mpi
from keras_ddl.topology import make_topology

SETTINGS = json.loads(sys.argv[1])
COLLECTIVE = SETTINGS.get("collective", "all_reduce")
COMPRESSIONS = ("bfloat16", "float16")
WORLD = MPI.COMM_WORLD


def make_contestant(name: str) -> tuple[str, Callable[[np.ndarray, np.ndarray], object]]:
    """Returns (description, call) of a contestant.

    The contestants are "keras_ddl" (as initialised), "bfloat16" or "float16" (with compression), "mpi", "tcp", or
    a mode ("x:1x8" is a flat ring).
    """
    if name == "tcp":
        return "sockets", TcpStreams(WORLD, SETTINGS["racks"])
    if name == "mpi":
        call = WORLD.Allreduce if COLLECTIVE == "all_reduce" else by_mpi(WORLD, COLLECTIVE)
        return MPI.Get_library_version().splitlines()[0].split(",")[0], call
    comm = make_communicator(name)
    if COLLECTIVE != "all_reduce":
        return comm.describe(), by_keras_ddl(comm, COLLECTIVE, f"cluster-{name}")
    if name in COMPRESSIONS:
        options = {"compression": name, "feedback": name}
        return comm.describe(), lambda source, result: comm.all_reduce(source, "sum", name, out=result, **options)
    return comm.describe(), lambda source, result: comm.all_reduce(source, "sum", f"cluster-{name}", out=result)


def make_communicator(name: str) -> binding.NativeCommunicator:
    """Returns a communicator of all ranks in the box of "keras_ddl" (as initialised) or of a mode. COLLECTIVE."""
    if name == "keras_ddl" or name in COMPRESSIONS:
        topology = keras_ddl.topology()
    else:
        topology = make_topology(WORLD.rank, WORLD.allgather(MPI.Get_processor_name()), name)
    return binding.NativeCommunicator(
        mpi.transport(WORLD),
        topology.group,
        topology.dims[1:],
        id=1 + SETTINGS["contestants"].index(name),
        **group.settings(),
    )


def pattern(count: int, rank: int) -> np.ndarray:
    """Returns whole numbers whose sum over the ranks is known, and exact in float32 (up to 10 ranks in bfloat16)."""
    values = np.arange(count, dtype=np.int32) % 17 + rank
    return values.astype(np.float32)


def measure(
    call, source: np.ndarray, cables: Cables, prepare: Callable[[], None] | None = None
) -> tuple[float, float, dict[str, int], bool]:
    """Returns the slowest rank's seconds, all ranks' CPU seconds, bytes sent, and whether all results are right.

    TcpStreams has no result and counts as right. `prepare` runs just before the call, and its bytes count.
    """
    own = chunk_of(source.size, WORLD.rank, WORLD.size)
    whole, first = source.size, 0
    result = np.full_like(source, -1)
    if COLLECTIVE == "reduce_scatter":
        result, first = result[own], own.start
    if COLLECTIVE == "all_gather":
        source = source[own]
    WORLD.Barrier()
    before = cables.sent()
    if prepare is not None:
        prepare()
    WORLD.Barrier()
    cpu, start = time.process_time(), time.perf_counter()
    call(source, result)
    seconds = WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
    cpu = WORLD.allreduce(time.process_time() - cpu, MPI.SUM)
    WORLD.Barrier()
    time.sleep(0.05)  # for acknowledgements that are still on their way
    sent = {name: total - before.get(name, 0) for name, total in cables.sent().items()}
    ranks = WORLD.size
    right = True
    for at in [] if isinstance(call, TcpStreams) else range(0, result.size, 1 << 20):
        numbers = np.arange(first + at, first + min(result.size, at + (1 << 20)), dtype=np.int64) % 17
        if COLLECTIVE == "all_gather":
            part = numbers + np.repeat(np.arange(ranks), [_length(whole, r) for r in range(ranks)])[at : at + (1 << 20)]
        else:
            part = numbers * ranks + ranks * (ranks - 1) // 2
        right = right and bool((result[at : at + (1 << 20)] == part.astype(np.float32)).all())
    return seconds, cpu, sent, WORLD.allreduce(right, MPI.LAND)


def _length(count: int, rank: int) -> int:
    chunk = chunk_of(count, rank, WORLD.size)
    return chunk.stop - chunk.start


def main() -> None:
    keras_ddl.init(SETTINGS["mode"])
    cables = Cables(SETTINGS["counters"])
    contestants = {name: make_contestant(name) for name in SETTINGS["contestants"]}
    rows = []
    for nbytes in SETTINGS["sizes"]:
        source = pattern(nbytes // 4, WORLD.rank)
        warm = source[: min(source.size, 1 << 18)].copy()
        runs: dict[str, list] = {name: [] for name in contestants}
        for _, call in contestants.values():
            measure(call, warm, cables)  # opens connections and touches memory
        for _ in range(SETTINGS["rounds"]):
            for name, (_, call) in contestants.items():
                runs[name].append(measure(call, source, cables))
        for name, measured in runs.items():
            sent = [run[2] for run in measured]
            rows.append(
                {
                    "contestant": name,
                    "runs_on": contestants[name][0],
                    "bytes": source.nbytes,
                    "seconds": statistics.median(run[0] for run in measured),
                    "all_seconds": [run[0] for run in measured],
                    "cpu_seconds": statistics.median(run[1] for run in measured),
                    "sent": {link: statistics.median(one[link] for one in sent) for link in sent[0]},
                    "right": all(run[3] for run in measured),
                }
            )
    hosts = WORLD.allgather(MPI.Get_processor_name())
    sessions = len(set(WORLD.allgather(os.getsid(0))))
    if WORLD.rank == 0:
        congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        where = f"{machine()}, TCP with {congestion}"
        result = {"machine": where, "hosts": hosts, "sessions": sessions, "describe": describe(), "rows": rows}
        print(SETTINGS["mark"] + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
