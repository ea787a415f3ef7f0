"""Reduce-scatter and all-gather of arrays by keras_ddl and by MPI, for benchmarks/all_reduce.py and cluster.py.

In all_reduce.py, MPI's ranks have no keras_ddl.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

    from keras_ddl.communicator.native import binding

COLLECTIVES = ("reduce_scatter", "all_gather")
PATIENCE_US = 10_000


def chunk_of(count: int, rank: int, size: int) -> slice:
    """The elements of `count` that are rank's: the first ranks have one more."""
    base, more = divmod(count, size)
    begin = base * rank + min(rank, more)
    return slice(begin, begin + base + (rank < more))


def prepared(
    comm: binding.NativeCommunicator, collective: str, name: str, source: np.ndarray, result: np.ndarray
) -> Callable[[], None]:
    """Returns a prepared call from `source` into `result`, which may have different lengths, like `all_reduce_init`.

    If all ranks share memory, the calling threads run it themselves.
    """
    from keras_ddl.communicator.native import native_library, requests

    core = native_library.core()
    kinds = {"reduce_scatter": requests.REDUCE_SCATTER, "all_gather": requests.ALL_GATHER}
    output = result if collective == "reduce_scatter" else None
    fields = {"op": requests.OPS["sum"], "row_count": 1, "rows": source.size}
    request = comm._request(kinds[collective], name, source, output, **fields)
    # An all_gather asks for the memory of its result after it knows every rank's rows.
    address = result.ctypes.data
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(lambda *_: address)
    request.allocate = ctypes.cast(allocate, ctypes.c_void_p)
    try_run = core["ddl_try_run"]
    handle, reference, patience = ctypes.c_void_p(comm._comm), ctypes.byref(request), ctypes.c_uint32(PATIENCE_US)

    def call(_kept=(allocate, source, result)) -> None:
        if try_run(handle, reference, patience):
            return
        work = core.ddl_start(handle, reference)
        while not core.ddl_work_wait(work, 100):
            pass
        assert not (failure := core.ddl_work_failure(work)), failure.contents.message
        core.ddl_work_free(work)

    return call


def by_keras_ddl(
    comm: binding.NativeCommunicator, collective: str, name: str
) -> Callable[[np.ndarray, np.ndarray], None]:
    """Returns a call (input, output) of keras_ddl's collective; the arrays may have different lengths."""
    return lambda source, result: prepared(comm, collective, name, source, result)()


def by_mpi(world: MPI.Intracomm, collective: str) -> Callable[[np.ndarray, np.ndarray], None]:
    """Returns the same call as `by_keras_ddl`, but of MPI."""

    def counts(n: int) -> list[int]:
        slices = (chunk_of(n, rank, world.size) for rank in range(world.size))
        return [each.stop - each.start for each in slices]

    if collective == "reduce_scatter":
        return lambda source, result: world.Reduce_scatter(source, result, counts(source.size))
    return lambda source, result: world.Allgatherv(source, [result, counts(result.size)])
