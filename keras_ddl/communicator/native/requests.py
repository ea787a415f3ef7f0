"""Runs collectives on raw memory through the native core; `binding` runs them on arrays."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from ctypes import byref, c_void_p
from hashlib import blake2b
from typing import Any, NamedTuple

from keras_ddl import errors
from keras_ddl.communicator.native.dtypes import DTYPES
from keras_ddl.communicator.native.native_library import NOT_FOUND, Buffer, Place, Request, core
from keras_ddl.communicator.native.native_signals import Interruption
from keras_ddl.communicator.native.started import WAIT_SLICE_MS, Started
from keras_ddl.communicator.reporting.idleness import waits_for_collectives

# Public spelling -> number in ddl.h.
OPS = {"sum": 0, "mean": 1, "min": 2, "max": 3, "product": 4, "avg": 1}
ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, BARRIER, JOIN, ALL_TO_ALL = range(7)
COMPRESSIONS = {None: 0, "bfloat16": 1, "float16": 2}
_CUDA = 1  # value of ddl_device_kind
FLAG_PLAIN_MPI, FLAG_CHECK, FLAG_BLOCKING, FLAG_ALL_RANKS, FLAG_CANCELS, FLAG_RESUMES = 1, 2, 4, 8, 16, 32

# How long a blocking caller polls for the other ranks before it hands its request to the communication thread, which
# waits without using a core.
PATIENCE_US = 500


class Memory(NamedTuple):
    """The addresses of a request's input and result, and the number of elements; see ddl_buffer of ddl.h.

    device: the number of the GPU that holds the memory; None: the host holds it.
    """

    source: int
    result: int | None
    elements: int
    device: int | None = None

    def buffer(self) -> Buffer:
        place = (0, 0) if self.device is None else (_CUDA, self.device)
        return Buffer(self.source, self.result, self.elements, place)


class _Waited(NamedTuple):
    """A submitted request that was not waited for to its end.

    work: its ddl_work.
    keep: a reference to the memory that it reads and writes.
    """

    work: int
    request: Request
    keep: Any


class Requests:
    """Runs collectives of a ddl_comm, which the derived class owns."""

    def __init__(self, comm: int, size: int, id: int, note: str) -> None:
        self._comm = comm
        self._size = size
        self._id = id
        self._note = note
        self._closed, self._closed_by = False, ""
        self._waiting = False  # the main thread waits for the communication thread; signal handlers may run
        self._abandoned: list[Any] = []
        self._left_join: _Waited | None = None
        self._interruption = Interruption()

    def request(
        self,
        kind: int,
        name: str,
        dtype: str,
        memory: Sequence[Memory],
        *,
        detail: str = "",
        op: int = 0,
        flags: int = 0,
        tolerance: float = 0.0,
        compression: str | None = None,
        feedback: str = "",
        root: int = 0,
        row_count: int = 0,
        rows: int = 0,
        splits: Sequence[int] | None = None,
        place: Place | None = None,
        stream: int = 0,
    ) -> Request:
        """Returns a request for `run` or `start`, with the fields of ddl_request in ddl.h.

        Args:
            detail: text that must be equal on all ranks.
            place: memory for the rows of all ranks; None: the core allocates it (`Started.copy_to`).
            stream: a stream of the GPU that holds the memory; the collective waits for the work queued so far.
        """
        allocate = None if place is None else ctypes.cast(core().ddl_allocate_in_place, c_void_p)
        result = Request(
            kind=kind,
            dtype=DTYPES[dtype],
            op=op,
            root=root,
            flags=flags,
            compression=COMPRESSIONS[compression],
            num_buffers=len(memory),
            buffers=(Buffer * len(memory))(*(each.buffer() for each in memory)) if memory else None,
            row_count=row_count,
            rows=rows,
            splits=None if splits is None else ctypes.cast((ctypes.c_int64 * len(splits))(*splits), c_void_p),
            fingerprint=int.from_bytes(blake2b(detail.encode(), digest_size=8).digest(), "little"),
            tolerance=tolerance,
            name=name.encode(),
            detail=detail.encode() or None,
            feedback=feedback.encode() or None,
            allocate=allocate,
            interrupted=self._interruption.function,
            user=None if place is None else ctypes.cast(ctypes.pointer(place), c_void_p),
            stream=stream,
        )
        result.place = place  # keeps it alive
        return result

    def run(self, request: Request, keep: Any) -> list[bytes] | None:
        """Runs a collective and returns when it is done. `keep`: a reference to the memory that it reads and writes.

        Returns: the bytes of every rank, for an ALL_GATHER without a `place`.
        Raises: the errors of collectives in keras_ddl.errors.
        """
        self._refuse_in_handler(request)
        gathers = request.kind == ALL_GATHER and not request.allocate
        ran = not gathers and core().ddl_try_run(self._comm, byref(request), PATIENCE_US)
        if ran != 1:
            self._interruption.reraise()
        return None if ran else self.submit(request, keep)

    def start(self, request: Request, keep: Any) -> Started:
        """Submits a collective. `keep`: a reference to the memory that it reads and writes."""
        self._refuse_in_handler(request)
        work = self._submit(request)
        return Started(work, request, keep, self._error)

    def submit(self, request: Request, keep: Any) -> list[bytes] | None:
        """Runs a collective as `run` does, but always in the communication thread."""
        self._refuse_in_handler(request)
        blocking = FLAG_BLOCKING if threading.current_thread() is threading.main_thread() else 0
        request.flags = request.flags & ~FLAG_BLOCKING | blocking  # any thread may submit a request
        return self._result(_Waited(self._submit(request), request, keep))

    def _submit(self, request: Request) -> int:
        work: int | None = core().ddl_start(self._comm, byref(request))
        if work is None:
            raise MemoryError(f"out of memory for the request of '{request.name.decode()}'")
        return work

    def _result(self, waited: _Waited) -> list[bytes] | None:
        request, work = waited.request, waited.work
        done = False
        try:
            done = self._wait(work, waited.keep)
            error = self._error(work)
            if error is not None:
                raise error
            return self._gathered(work) if request.kind == ALL_GATHER and not request.allocate else None
        finally:
            if not done and request.kind == JOIN:  # stays submitted; a later `join` waits for it again
                self._left_join = waited
            else:
                core().ddl_work_free(work)

    def _error(self, work: int) -> errors.KerasDdlError | None:
        """Returns the error of a finished request, or None if it has succeeded."""
        failure = core().ddl_work_failure(work)
        if not failure:
            return None
        error: errors.KerasDdlError = failure.contents.error(self._id, self._note)
        if failure.contents.code == NOT_FOUND:
            tensor_prefix = f"'{error.tensor}': " if error.tensor else ""
            error.args = (f"{tensor_prefix}{error}. {self._closed_by}".rstrip(),)
        return error

    def _refuse_in_handler(self, request: Request) -> None:
        if self._interruption.is_handling() or self._is_in_handler_of_wait():
            raise errors.CollectiveError(
                "A signal handler must not start a collective while the main thread is in the middle of one: both "
                f"would wait forever. Received: '{request.name.decode()}' in a handler. Let the handler set a flag, "
                "and check it between two steps."
            )

    def _is_in_handler_of_wait(self) -> bool:
        return self._waiting and threading.current_thread() is threading.main_thread()

    @waits_for_collectives
    def _wait(self, work: int, keep: Any) -> bool:
        done, main = False, threading.current_thread() is threading.main_thread()
        self._waiting = self._waiting or main
        try:
            while not (done := bool(core().ddl_work_wait(work, WAIT_SLICE_MS))):
                pass
        finally:
            self._waiting = self._waiting and not main
            if not done:  # KeyboardInterrupt: the communication thread may still read and write the memory
                self._abandoned.append(keep)
        return done

    def _gathered(self, work: int) -> list[bytes]:
        rows = core().ddl_work_rows(work)[: self._size]
        everything = ctypes.string_at(core().ddl_work_data(work), sum(rows))
        return [everything[end - length : end] for length, end in zip(rows, itertools.accumulate(rows))]
