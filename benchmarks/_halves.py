"""Reduce-scatter and all-gather of arrays, as benchmarks/cluster.py measures them: of keras_ddl and of MPI."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from keras_ddl.communicator import binding
from keras_ddl.communicator.native_library import core


def chunk_of(count: int, rank: int, size: int) -> slice:
    """The elements of `count` that are rank's: the first ranks have one more."""
    base, more = divmod(count, size)
    begin = base * rank + min(rank, more)
    return slice(begin, begin + base + (rank < more))


def by_keras_ddl(comm: binding.Communicator, collective: str, name: str) -> Callable[[np.ndarray, np.ndarray], None]:
    """The call of (input, output), each of its own length."""
    if collective == "reduce_scatter":
        return lambda source, result: comm._run(
            binding.REDUCE_SCATTER, name, source, result, op=binding.OPS["sum"], row_count=1, rows=source.size
        )

    def all_gather(source: np.ndarray, result: np.ndarray) -> None:
        request = comm._request(binding.ALL_GATHER, name, source, None, row_count=1, rows=source.size)
        work = core().ddl_start(comm._comm, ctypes.byref(request))
        while not core().ddl_work_wait(work, 100):
            pass
        assert core().ddl_work_code(work) == 0, core().ddl_work_message(work)
        ctypes.memmove(result.ctypes.data, core().ddl_work_data(work), result.nbytes)
        core().ddl_work_free(work)

    return all_gather


def by_mpi(world: MPI.Intracomm, collective: str) -> Callable[[np.ndarray, np.ndarray], None]:
    """As `by_keras_ddl`."""

    def counts(n: int) -> list[int]:
        slices = (chunk_of(n, rank, world.size) for rank in range(world.size))
        return [each.stop - each.start for each in slices]

    if collective == "reduce_scatter":
        return lambda source, result: world.Reduce_scatter(source, result, counts(source.size))
    return lambda source, result: world.Allgatherv(source, [result, counts(result.size)])
