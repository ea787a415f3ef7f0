"""One rank of one contestant of benchmarks/all_reduce.py: sleeps until it is its turn, measures, reports.

python _contestant.py HOST:PORT NAME LIBRARY PIN      LIBRARY: keras_ddl or mpi
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time

import _hand_over
import numpy as np


class KerasDdl:
    """all_reduce over keras_ddl, prepared once per buffer."""

    def __init__(self) -> None:
        import keras_ddl
        from keras_ddl.communicator import all_reduce_init

        keras_ddl.init()
        self.rank, self.size = keras_ddl.rank(), keras_ddl.size()
        self.barrier, self._init = keras_ddl.barrier, all_reduce_init
        self.version = f"keras_ddl {keras_ddl.__version__}: {keras_ddl.communicator.describe()}"

    def prepare(self, source, result):
        return self._init(source, "sum", "benchmark", out=result)


class Mpi:
    """MPI_Allreduce through mpi4py."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        self.barrier = self._world.Barrier
        self.version = MPI.Get_library_version().splitlines()[0].strip()

    def prepare(self, source, result):
        return lambda: self._world.Allreduce(source, result)


def numpy_dtype(name: str) -> np.dtype:
    """np.dtype(name), bfloat16 included."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def main() -> None:
    address, name, library, pin = sys.argv[1:]
    host, port = address.rsplit(":", 1)
    contestant = KerasDdl() if library == "keras_ddl" else Mpi()
    cores = sorted(os.sched_getaffinity(0))
    if pin == "1":
        os.sched_setaffinity(0, {cores[contestant.rank % len(cores)]})
    # Asleep in a socket, not in a barrier: MPI libraries spin there and would take the others' cores.
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rw") as lines:
        print(json.dumps([name, contestant.rank, contestant.version]), file=lines, flush=True)
        call = None
        for line in lines:
            order = json.loads(line)
            if "dtype" in order:
                count, dtype = order["count"], numpy_dtype(order["dtype"])
                source = (np.arange(count) % 7 + contestant.rank).astype(dtype)
                result = np.zeros_like(source)
                copy, passed = np.zeros_like(source), np.zeros_like(source)
                call = contestant.prepare(source, result)
                for _ in range(order["warmup"]):
                    call()
                expected = (np.arange(min(count, 1 << 16)) % 7 * contestant.size).astype(dtype)
                expected += dtype.type(contestant.size * (contestant.size - 1) // 2)
                answer = bool(np.array_equal(result[: len(expected)], expected))
            elif order["what"] == "hand_over":
                where = order["library"], order["shared"]
                answer = _hand_over.seconds(*where, contestant.rank, contestant.size, passed, order["repeat"])
            else:
                timed = call if order["what"] == "all_reduce" else functools.partial(np.copyto, copy, source)
                contestant.barrier()
                start = time.perf_counter()
                for _ in range(order["repeat"]):
                    timed()
                answer = (time.perf_counter() - start) / order["repeat"]
            print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main()
