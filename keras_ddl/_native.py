"""The native core and the MPI shim through ctypes: library lookup, mirrors of the structs in ddl.h, requests.

The only module that uses ctypes. It knows nothing of launchers or topologies; communicator.py puts them together.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_ddl import _whereabouts, errors

if TYPE_CHECKING:
    import numpy as np

ABI_VERSION = 2

# Numbers of ddl.h; the spellings are those of the public functions.
DTYPES = {
    name: number
    for number, name in enumerate(
        ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8"),
    )
}
OPS = {"sum": 0, "mean": 1, "min": 2, "max": 3, "product": 4, "avg": 1}
ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, BARRIER = range(5)
WORLD = 0  # the id of the communicator of all ranks
FLAG_PLAIN_MPI, FLAG_CHECK, FLAG_BLOCKING = 1, 2, 4

_FAILED_PRECONDITION = 9
_ERROR_BYTES = 4096
# Long enough to cost nothing, short enough for Ctrl-C to feel immediate: signals are handled between two slices.
_WAIT_SLICE_MS = 100
# A caller that waits anyway looks this long for the other ranks before it leaves its request to the communication
# thread, which waits without using a core.
_PATIENCE_US = 500

_WarnFunction = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)


class _Buffer(Structure):
    _fields_ = (("input", c_void_p), ("output", c_void_p), ("count", c_uint64))


class _Request(Structure):
    _fields_ = (
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("op", c_uint32),
        ("root", c_int32),
        ("flags", c_uint32),
        ("num_buffers", c_uint32),
        ("buffers", POINTER(_Buffer)),
        ("row_count", c_uint64),
        ("rows", c_uint64),
        ("fingerprint", c_uint64),
        ("step", c_uint64),
        ("tolerance", c_double),
        ("name", c_char_p),
        ("detail", c_char_p),
        ("allocate", c_void_p),
        ("done", c_void_p),
        ("user", c_void_p),
    )


class _Transport(Structure):
    """Opaque here: filled by the shim, read by the core."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("rank", c_int),
        ("size", c_int),
        ("self", c_void_p),
        ("functions", c_void_p * 10),
    )


class _Options(Structure):
    _fields_ = (
        ("abi_version", c_uint32),
        ("group", POINTER(c_int32)),
        ("outer", POINTER(c_int32)),
        ("num_outer", c_uint32),
        ("staging_bytes", c_uint64),
        ("warn_after_s", c_double),
        ("deadline_s", c_double),
        ("lost_after_s", c_double),
        ("warn", _WarnFunction),
        ("warn_user", c_void_p),
    )


def library_path(name: str) -> Path:
    """Returns the path of a native library, e.g. "libkeras_ddl.so".

    Raises:
        DependencyError: it is nowhere in the package.
    """
    package = sys.modules["keras_ddl"]
    for folder in package.__path__:
        path = Path(folder) / name
        if path.exists():
            return path
    raise errors.DependencyError(
        f"keras_ddl needs its native library {name}. It is not in {', '.join(package.__path__)}. "
        "Install the package with pip (`pip install .` in a checkout); running from the source folder is not enough."
    )


def _load(name: str) -> ctypes.CDLL:
    path = library_path(name)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise errors.DependencyError(f"{path} could not be loaded: {error}") from error


def _declare(library: ctypes.CDLL, result: Any, **functions: tuple[Any, ...]) -> None:
    for name, arguments in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


@functools.cache
def core() -> ctypes.CDLL:
    """Returns libkeras_ddl.so with its functions declared.

    Raises:
        DependencyError: the library is missing, does not load, or has another ABI version.
    """
    library = _load("libkeras_ddl.so")
    _declare(library, c_uint32, ddl_abi_version=())
    if library.ddl_abi_version() != ABI_VERSION:
        raise errors.DependencyError(
            f"keras_ddl's Python code needs ABI version {ABI_VERSION} of libkeras_ddl.so. "
            f"Received: version {library.ddl_abi_version()} in {library._name}. Reinstall keras_ddl."
        )
    _declare(library, c_void_p, ddl_create=(POINTER(_Transport), POINTER(_Options), c_char_p, c_size_t))
    _declare(library, None, ddl_close=(c_void_p,), ddl_release=(c_void_p,), ddl_publish=(ctypes.c_int64, c_void_p))
    _declare(library, None, ddl_work_free=(c_void_p,))
    _declare(library, c_void_p, ddl_start=(c_void_p, POINTER(_Request)), ddl_work_data=(c_void_p,))
    _declare(library, c_int, ddl_work_wait=(c_void_p, c_int), ddl_work_code=(c_void_p,))
    _declare(library, c_int, ddl_next_question=(c_void_p,))
    _declare(library, None, ddl_hold=(c_void_p,), ddl_answer=(c_void_p, c_char_p))
    _declare(library, c_int, ddl_try_run=(c_void_p, POINTER(_Request), c_uint32))
    _declare(library, c_char_p, ddl_work_message=(c_void_p,), ddl_describe=(c_void_p,))
    _declare(library, POINTER(c_uint64), ddl_work_rows=(c_void_p,))
    _declare(library, c_int, ddl_trace_start=(c_char_p, c_int, c_char_p, c_char_p, c_size_t))
    _declare(library, c_int, ddl_trace_stop=(c_char_p, c_size_t))
    _declare(library, None, ddl_trace_span=(c_char_p, c_double, c_double))
    return library


@functools.cache
def mpi_shim() -> ctypes.CDLL:
    """Returns libkeras_ddl_mpi.so with its functions declared. Loading it loads the MPI library it was built for.

    Raises:
        DependencyError: the library is missing, or its MPI library is not found.
    """
    library = _load("libkeras_ddl_mpi.so")
    _declare(library, c_int, ddl_mpi_create=(c_int, POINTER(_Transport), c_char_p, c_size_t))
    some_ranks = (POINTER(c_int32), c_int, c_int)
    _declare(library, c_int, ddl_mpi_split=(POINTER(_Transport), *some_ranks, POINTER(_Transport), c_char_p, c_size_t))
    texts = ("ddl_mpi_library", "ddl_mpi_loaded_version", "ddl_mpi_loaded_path", "ddl_mpi_site_launcher")
    _declare(library, c_char_p, **dict.fromkeys(texts, ()))
    return library


def mpi_text(name: str) -> str:
    """Returns the text of a ddl_mpi_* function of the shim that takes no arguments."""
    return getattr(mpi_shim(), name)().decode(errors="replace")


def mpi_transport(fortran_comm: int) -> _Transport:
    """Returns a way to the ranks of an MPI communicator, by its handle. COLLECTIVE over them.

    Raises:
        DependencyError: MPI is not initialised, or without MPI_THREAD_MULTIPLE.
        CollectiveError: MPI failed.
    """
    transport, message = _Transport(), ctypes.create_string_buffer(_ERROR_BYTES)
    code = mpi_shim().ddl_mpi_create(fortran_comm, byref(transport), message, _ERROR_BYTES)
    if code:
        kind = errors.DependencyError if code == _FAILED_PRECONDITION else errors.CollectiveError
        raise kind(message.value.decode(errors="replace"))
    return transport


class Communicator:
    """A ddl_comm: this process's end of a group of ranks. Owns a communication thread until `close`."""

    def __init__(
        self,
        transport: _Transport | None,
        group: Sequence[int],
        outer: Sequence[int] = (),
        *,
        staging_bytes: int,
        warn_after_seconds: float,
        deadline_seconds: float,
        lost_after_seconds: float,
        id: int = WORLD,
        note: str = "",
    ) -> None:
        """COLLECTIVE over the ranks of `transport`, which it takes over; None: one rank, without MPI.

        `id`: by which ops find it, equal on all its ranks. `note`: added to the messages of its errors.

        `outer`: the box that the groups form in the order of their leaders, fastest dimension first; (): one dimension.

        Raises:
            CollectiveError: the ranks could not meet.
        """
        library = core()
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        options = _Options(
            abi_version=ABI_VERSION,
            group=(c_int32 * len(group))(*group),
            outer=(c_int32 * len(outer))(*outer),
            num_outer=len(outer),
            staging_bytes=staging_bytes,
            warn_after_s=warn_after_seconds,
            deadline_s=deadline_seconds,
            lost_after_s=lost_after_seconds,
        )
        self._comm = library.ddl_create(
            None if transport is None else byref(transport), byref(options), message, _ERROR_BYTES
        )
        if not self._comm:
            raise errors.CollectiveError(message.value.decode(errors="replace"))
        self._transport = transport
        self._size = len(group)
        self._id = id
        self._note = note
        self._closed = False
        self._splitting = 0
        self._changed = threading.Condition()  # guards both
        self._process = os.getpid()
        self._abandoned: list[Any] = []
        library.ddl_publish(id, self._comm)
        if self._size > 1:
            library.ddl_hold(self._comm)
            threading.Thread(target=_answer_questions, args=(self._comm,), name="keras_ddl", daemon=True).start()

    def close(self) -> None:
        """Leaves the group: what the other ranks still wait for fails there with RankLostError. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: self._splitting == 0)
        core().ddl_publish(self._id, None)
        core().ddl_close(self._comm)

    def sub_transport(self, ranks: Sequence[int], tag: int) -> _Transport:
        """Returns a way to some of the ranks, for a communicator of its own. COLLECTIVE over `ranks`.

        Args:
            ranks: in the order of the new ranks.
            tag: tells apart what is made at the same time.

        Raises:
            NotInitializedError: this was closed. CollectiveError: MPI failed.
        """
        transport, message = _Transport(), ctypes.create_string_buffer(_ERROR_BYTES)
        with self._changed:
            if self._closed:
                raise errors.NotInitializedError("The communicator was closed while it was split.")
            self._splitting += 1  # closing frees the transport
        try:
            code = mpi_shim().ddl_mpi_split(
                byref(self._transport),
                (c_int32 * len(ranks))(*ranks),
                len(ranks),
                tag % 32768,
                byref(transport),
                message,
                _ERROR_BYTES,
            )
        finally:
            with self._changed:
                self._splitting -= 1
                self._changed.notify_all()
        if code:
            raise errors.CollectiveError(message.value.decode(errors="replace"))
        return transport

    def __del__(self) -> None:
        # Only now: another thread may have been about to use it when it was closed.
        if getattr(self, "_comm", None) and os.getpid() == self._process:  # a fork has no communication thread
            self.close()
            core().ddl_release(self._comm)

    def describe(self) -> str:
        """What this communicator runs on, for people."""
        return core().ddl_describe(self._comm).decode(errors="replace")

    def all_reduce(
        self,
        array: np.ndarray,
        op: str,
        name: str,
        *,
        out: np.ndarray | None = None,
        flags: int = 0,
        tolerance: float = 0.0,
    ) -> Any:
        """Returns `out` (default: a new array), `array` reduced over the ranks; dtype one of DTYPES, op one of OPS."""
        source = _contiguous(array)
        result = _empty_like(source) if out is None else out
        return self._run(
            ALL_REDUCE, name, source, result, op=OPS[op], detail=_text(array), flags=flags, tolerance=tolerance
        )

    def broadcast(self, array: np.ndarray, root: int, name: str) -> Any:
        """Returns a new array, the one of rank `root`. dtype and shape are equal on all ranks; any dtype but object."""
        source = _contiguous(array)
        result = _empty_like(source)
        self._run(BROADCAST, name, _native_view(source), _native_view(result), root=root, detail=_text(array))
        return result

    def all_gather_bytes(self, data: bytes, name: str, *, detail: str = "") -> list[bytes]:
        """Returns the bytes of every rank."""
        import numpy as np

        source = np.frombuffer(data, np.uint8)
        return self._run(ALL_GATHER, name, source, None, detail=detail, row_count=1, rows=len(data))

    def barrier(self, name: str) -> None:
        """Returns when every rank has come."""
        self._run(BARRIER, name, None, None)

    def all_reduce_init(self, array: np.ndarray, op: str, name: str, out: np.ndarray) -> Callable[[], Any]:
        """Returns a function that reduces what `array`, which is C-contiguous, holds at the time into `out`."""
        request = self._request(ALL_REDUCE, name, array, out, op=OPS[op], detail=_text(array))
        try_run, comm, reference = core().ddl_try_run, self._comm, byref(request)

        def start_and_wait() -> Any:
            if not try_run(comm, reference, _PATIENCE_US):
                self._submit(request, array, out)
            return out

        return start_and_wait

    def _run(self, kind, name, source, result, **fields):
        request = self._request(kind, name, source, result, **fields)
        if kind != ALL_GATHER and core().ddl_try_run(self._comm, byref(request), _PATIENCE_US):
            return result
        return self._submit(request, source, result)

    def _request(
        self, kind, name, source, result, *, detail="", op=0, flags=0, tolerance=0.0, root=0, row_count=0, rows=0
    ) -> _Request:
        buffers = None
        if source is not None:
            output = None if result is None else result.ctypes.data
            buffers = (_Buffer * 1)(_Buffer(source.ctypes.data, output, source.size))
        return _Request(
            kind=kind,
            dtype=0 if source is None else DTYPES[source.dtype.name],
            op=op,
            root=root,
            flags=flags,
            num_buffers=0 if source is None else 1,
            buffers=buffers,
            row_count=row_count,
            rows=rows,
            fingerprint=int.from_bytes(blake2b(detail.encode(), digest_size=8).digest(), "little"),
            tolerance=tolerance,
            name=name.encode(),
            detail=detail.encode() or None,
        )

    def _submit(self, request: _Request, source: Any, result: Any) -> Any:
        """Leaves the request to the communication thread and waits for it."""
        if threading.current_thread() is threading.main_thread():
            request.flags |= FLAG_BLOCKING
        work = core().ddl_start(self._comm, byref(request))
        try:
            self._wait(work, (source, result))
            code = core().ddl_work_code(work)
            if code:
                text = core().ddl_work_message(work).decode(errors="replace") + self._note
                if self._closed and code == _FAILED_PRECONDITION:
                    raise errors.NotInitializedError(f"'{request.name.decode()}': {text}.")
                raise errors.from_code(code, text)
            return self._gathered(work) if request.kind == ALL_GATHER else result
        finally:
            core().ddl_work_free(work)

    def _wait(self, work: int, arrays: Any) -> None:
        done = False
        try:
            while not (done := bool(core().ddl_work_wait(work, _WAIT_SLICE_MS))):
                pass
        finally:
            if not done:  # KeyboardInterrupt: the communication thread may still read and write the arrays
                self._abandoned.append(arrays)

    def _gathered(self, work: int) -> list[bytes]:
        rows = core().ddl_work_rows(work)[: self._size]
        everything = ctypes.string_at(core().ddl_work_data(work), sum(rows))
        return [everything[end - length : end] for length, end in zip(rows, itertools.accumulate(rows))]


def _answer_questions(comm: int) -> None:
    library = core()
    _whereabouts.answer_questions(
        lambda: bool(library.ddl_next_question(comm)),
        lambda text: library.ddl_answer(comm, text.encode(errors="replace")),
    )
    library.ddl_release(comm)


def trace_start(path: str, rank: int, label: str) -> str:
    """Starts this process's timeline; returns "" or what is wrong."""
    message = ctypes.create_string_buffer(_ERROR_BYTES)
    core().ddl_trace_start(path.encode(), rank, label.encode(), message, _ERROR_BYTES)
    return message.value.decode(errors="replace")


def trace_stop() -> str:
    """Ends the timeline; returns "" or what is wrong."""
    message = ctypes.create_string_buffer(_ERROR_BYTES)
    core().ddl_trace_stop(message, _ERROR_BYTES)
    return message.value.decode(errors="replace")


def trace_span(name: str, begin: float, end: float) -> None:
    """Adds a span to the timeline. Seconds of time.monotonic()."""
    core().ddl_trace_span(name.encode(), begin, end)


def is_supported(array: np.ndarray) -> bool:
    """Whether the native library reduces arrays of this dtype."""
    return array.dtype.name in DTYPES and array.dtype.isnative


def _text(array: np.ndarray) -> str:
    return f"array of dtype {array.dtype.name}, shape {list(array.shape)}"


def _contiguous(array: np.ndarray) -> np.ndarray:
    # Not np.ascontiguousarray, which makes a scalar one-dimensional.
    return array if array.flags.c_contiguous else array.copy(order="C")


def _empty_like(array: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.empty(array.shape, array.dtype)


def _native_view(array: np.ndarray) -> np.ndarray:
    """The array itself, or its bytes when its dtype is not one of DTYPES; a broadcast copies either."""
    import numpy as np

    if is_supported(array):
        return array
    return array.reshape(math.prod(array.shape)).view(np.uint8)
