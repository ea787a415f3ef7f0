"""One rank of one contestant of benchmarks/all_reduce.py: sleeps until its turn, measures and reports.

python _contestant.py HOST:PORT NAME LIBRARY PIN      LIBRARY: keras_ddl or mpi
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time

import _halves
import _hand_over
import numpy as np


class KerasDdl:
    """Collectives of keras_ddl, prepared once per buffer."""

    def __init__(self) -> None:
        import keras_ddl
        from keras_ddl.communicator import all_reduce_init, communicator_of

        keras_ddl.init()
        self.rank, self.size = keras_ddl.rank(), keras_ddl.size()
        self.barrier, self._init, self._world = keras_ddl.barrier, all_reduce_init, communicator_of(None)
        self.version = f"keras_ddl {keras_ddl.__version__}: {keras_ddl.communicator.describe()}"

    def prepare(self, collective, source, result):
        if collective == "all_reduce":
            return self._init(source, "sum", "benchmark", out=result)
        return _halves.prepared(self._world.native(), collective, "benchmark", source, result)


class Mpi:
    """MPI_Allreduce, MPI_Reduce_scatter and MPI_Allgatherv through mpi4py."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        self.barrier = self._world.Barrier
        self.version = MPI.Get_library_version().splitlines()[0].strip()

    def prepare(self, collective, source, result):
        if collective == "all_reduce":
            return lambda: self._world.Allreduce(source, result)
        return functools.partial(_halves.by_mpi(self._world, collective), source, result)


def numpy_dtype(name: str) -> np.dtype:
    """Returns np.dtype(name), also for bfloat16."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def buffers(collective: str, whole: np.ndarray, contestant) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns input, output and the first expected elements of the output; `whole` is this rank's i % 7 + rank."""
    count, rank, size = whole.size, contestant.rank, contestant.size
    own = _halves.chunk_of(count, rank, size)
    if collective == "all_gather":
        first = np.arange(min(_halves.chunk_of(count, 0, size).stop, 1 << 16)) % 7
        return whole[own].copy(), np.zeros_like(whole), first.astype(whole.dtype)
    start = own.start if collective == "reduce_scatter" else 0
    result = np.zeros(own.stop - own.start if collective == "reduce_scatter" else count, whole.dtype)
    expected = ((start + np.arange(min(result.size, 1 << 16))) % 7 * size).astype(whole.dtype)
    return whole, result, expected + whole.dtype.type(size * (size - 1) // 2)


def main() -> None:
    address, name, library, pin = sys.argv[1:]
    host, port = address.rsplit(":", 1)
    contestant = KerasDdl() if library == "keras_ddl" else Mpi()
    cores = sorted(os.sched_getaffinity(0))
    if pin == "1":
        os.sched_setaffinity(0, {cores[contestant.rank % len(cores)]})
    # Sleep in a socket, not in a barrier, where MPI libraries spin and would take the others' cores.
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rw") as lines:
        print(json.dumps([name, contestant.rank, contestant.version]), file=lines, flush=True)
        call = None
        for line in lines:
            order = json.loads(line)
            if "dtype" in order:
                count, dtype = order["count"], numpy_dtype(order["dtype"])
                whole = (np.arange(count) % 7 + contestant.rank).astype(dtype)
                copy, passed = np.zeros_like(whole), np.zeros_like(whole)
                source, result, expected = buffers(order["collective"], whole, contestant)
                call = contestant.prepare(order["collective"], source, result)
                for _ in range(order["warmup"]):
                    call()
                answer = bool(np.array_equal(result[: len(expected)], expected))
            elif order["what"] == "hand_over":
                where = order["library"], order["shared"]
                answer = _hand_over.seconds(*where, contestant.rank, contestant.size, passed, order["repeat"])
            else:
                timed = call if order["what"] == "collective" else functools.partial(np.copyto, copy, whole)
                contestant.barrier()
                start = time.perf_counter()
                for _ in range(order["repeat"]):
                    timed()
                answer = (time.perf_counter() - start) / order["repeat"]
            print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main()
