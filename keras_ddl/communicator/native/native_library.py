"""Loads the native libraries and declares their functions and structs (native/core/include/ddl.h) for ctypes."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from keras_ddl import errors, packages
from keras_ddl.communicator.native.native_signals import INTERRUPTED

ABI_VERSION = 16
DEADLINE_EXCEEDED, NOT_FOUND, FAILED_PRECONDITION = 4, 5, 9  # values of ddl_code
_RANK_NAMED = 3  # value of ddl_rank_role; ranks in the other roles are lost
ERROR_BYTES = 4096  # size of the buffers for error messages

# The MPI shims, by the MPI family whose binary interface they use. Intel MPI, MVAPICH and Cray's MPI share MPICH's. An
# installation for a site's MPI has one shim; a wheel made by `make wheel` has both.
_SHIMS = {"Open MPI": "libkeras_ddl_mpi_openmpi.so", "MPICH": "libkeras_ddl_mpi_mpich.so"}

_WarnFunction = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)


class FailedRank(Structure):
    _fields_ = (("rank", c_int32), ("role", c_uint32))


class Failure(Structure):
    """The reason why a function or request of the native library failed."""

    _fields_ = (
        ("code", c_int32),
        ("num_ranks", c_uint32),
        ("ranks", POINTER(FailedRank)),
        ("message", c_char_p),
        ("name", c_char_p),
        ("communicator", ctypes.c_int64),
    )

    def error(self, communicator: int | None = None, note: str = "") -> errors.KerasDdlError:
        """Returns the error that describes this failure.

        communicator: the id of the request's communicator; None: the id in this struct.
        """
        ranks = self.ranks[: self.num_ranks]
        return errors.from_code(
            self.code,
            self.message.decode(errors="replace") + note,
            lost=[each.rank for each in ranks if each.role != _RANK_NAMED],
            named=[each.rank for each in ranks if each.role == _RANK_NAMED],
            tensor=self.name.decode(errors="replace"),
            communicator=self.communicator if communicator is None else communicator,
        )


class Location(Structure):
    _fields_ = (("kind", c_uint32), ("id", c_int32))


class Buffer(Structure):
    _fields_ = (
        ("input", c_void_p),
        ("output", c_void_p),
        ("count", c_uint64),
        ("location", Location),
    )


class Request(Structure):
    _fields_ = (
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("op", c_uint32),
        ("root", c_int32),
        ("flags", c_uint32),
        ("compression", c_uint32),
        ("num_buffers", c_uint32),
        ("buffers", POINTER(Buffer)),
        ("row_count", c_uint64),
        ("rows", c_uint64),
        ("splits", c_void_p),
        ("fingerprint", c_uint64),
        ("step", c_uint64),
        ("tolerance", c_double),
        ("name", c_char_p),
        ("detail", c_char_p),
        ("feedback", c_char_p),
        ("allocate", c_void_p),
        ("done", c_void_p),
        ("interrupted", INTERRUPTED),
        ("user", c_void_p),
        ("plan", c_uint64),
        ("plan_run", c_uint64),
        ("plan_index", c_uint32),
        ("plan_size", c_uint32),
        ("stream", c_void_p),
    )


class Place(Structure):
    """The ddl_place of `ddl_allocate_in_place`: memory that the rows of all ranks fill exactly."""

    _fields_ = (("out", c_void_p), ("row_count", c_uint64), ("rows", c_uint64))


# A ddl_device of ddl_device.h, which Python only passes on.
Device = c_uint64 * 64


COUNTERS = (
    "control_sent",
    "control_received",
    "control_bytes_sent",
    "control_bytes_received",
    "coordinated",
    "ran_inline",
    "planned",
    "fell_back",
    "staged",
    "by_device",
    "hierarchical",
)


class Counters(Structure):
    _fields_ = tuple((name, c_uint64) for name in COUNTERS)


class Traced(Structure):
    _fields_ = (
        ("name", ctypes.c_char * 128),
        ("bytes", c_uint64),
        *((moment, c_double) for moment in ("submitted", "agreed", "started", "finished")),
    )


_BeginFunction = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_int, c_void_p, c_size_t, c_void_p)


class TransportFunctions(Structure):
    """The functions of a ddl_transport. Only those that Python calls are typed. The first argument is `self`."""

    _fields_ = (
        ("all_gather", ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t)),
        ("isend", _BeginFunction),  # (self, peer, tag, buffer, bytes, &operation) -> code
        ("irecv", _BeginFunction),
        ("test", ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)),  # (self, &operation, &finished) -> code
        ("cancel", ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)),  # (self, &operation) -> code
        ("probe", ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_void_p, c_void_p)),  # (self, tag, &peer, &bytes) -> code
        ("plain_all_reduce", c_void_p),
        ("last_error", ctypes.CFUNCTYPE(c_char_p, c_void_p)),
        ("lost_rank", ctypes.CFUNCTYPE(c_int, c_void_p)),  # may be NULL
        ("share", c_void_p),
        ("destroy", ctypes.CFUNCTYPE(None, c_void_p)),
    )


class Transport(Structure):
    """A ddl_transport: connects a group of ranks by MPI (`mpi`) or by sockets (`host`)."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("rank", c_int),
        ("size", c_int),
        ("self", c_void_p),
        ("functions", TransportFunctions),
    )

    def split(self, ranks: Sequence[int], tag: int) -> Transport:
        """Returns the transport of `ranks`, in the order of the new ranks. COLLECTIVE over these ranks.

        tag: a number that differs between transports that are made at the same time.

        Raises: CollectiveError: the ranks could not connect.
        """
        raise NotImplementedError

    def for_messages(self) -> Any:
        """Returns an object that sends and receives messages over this transport, which it takes over."""
        raise NotImplementedError

    def error(self, code: int) -> errors.KerasDdlError:
        """Returns the error of the last call of one of its functions, which has failed with `code`."""
        lost = self.functions.lost_rank(self.self) if self.functions.lost_rank else -1
        text = self.functions.last_error(self.self).decode(errors="replace")
        return errors.from_code(code, text, lost=(lost,) if lost >= 0 else ())

    def destroy(self) -> None:
        """Frees the transport. REQUIRES: no communicator has taken it over."""
        self.functions.destroy(self.self)


class Options(Structure):
    _fields_ = (
        ("abi_version", c_uint32),
        ("group", POINTER(c_int32)),
        ("outer", POINTER(c_int32)),
        ("num_outer", c_uint32),
        ("staging_bytes", c_uint64),
        ("staged_only", c_uint32),
        ("feedback_bytes", c_uint64),
        ("warn_after_s", c_double),
        ("deadline_s", c_double),
        ("lost_after_s", c_double),
        ("warn", _WarnFunction),
        ("warn_user", c_void_p),
    )


def library_path(name: str) -> Path:
    """Returns the path of a native library, e.g. "libkeras_ddl.so".

    Raises:
        DependencyError: the package has no such file.
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
    _declare(library, c_void_p, ddl_create=(POINTER(Transport), POINTER(Options), c_char_p, c_size_t))
    lane = (c_void_p, POINTER(Transport), POINTER(Options), c_char_p, c_size_t)
    _declare(library, c_int, ddl_add_lane=lane)
    device = (c_void_p, POINTER(Device), c_uint32, c_char_p, POINTER(c_uint64))
    _declare(library, c_int, ddl_add_device=device)
    _declare(library, None, ddl_count=(c_void_p, POINTER(Counters)))
    _declare(library, None, ddl_close=(c_void_p,), ddl_release=(c_void_p,), ddl_publish=(ctypes.c_int64, c_void_p))
    _declare(library, None, ddl_work_free=(c_void_p,))
    _declare(library, c_void_p, ddl_start=(c_void_p, POINTER(Request)), ddl_work_data=(c_void_p,))
    _declare(library, c_int, ddl_work_wait=(c_void_p, c_int))
    _declare(library, POINTER(Failure), ddl_work_failure=(c_void_p,), ddl_find_failure=(c_uint64,))
    _declare(library, c_uint64, ddl_keep_failure=(POINTER(Failure),))
    _declare(library, None, ddl_release_failure=(POINTER(Failure),))
    _declare(library, c_int, ddl_wait_for_position_query=(c_void_p,))
    _declare(library, None, ddl_hold=(c_void_p,), ddl_reply_position=(c_void_p, c_char_p))
    _declare(library, c_int, ddl_try_run=(c_void_p, POINTER(Request), c_uint32))
    _declare(library, c_char_p, ddl_describe=(c_void_p,))
    _declare(library, POINTER(c_uint64), ddl_work_rows=(c_void_p,))
    _declare(library, c_void_p, ddl_allocate_in_place=(c_void_p, POINTER(c_uint64), c_int))
    _declare(library, c_int, ddl_trace_start=(c_char_p, c_int, c_char_p, c_char_p, c_size_t))
    _declare(library, c_int, ddl_trace_stop=(c_char_p, c_size_t))
    _declare(library, None, ddl_trace_span=(c_char_p, c_double, c_double), ddl_trace_keep=(c_uint32,))
    _declare(library, c_uint32, ddl_trace_take=(POINTER(Traced), c_uint32))
    opened = (c_char_p, c_char_p, c_int, c_int, POINTER(Transport), c_char_p, c_size_t)
    gathered = (POINTER(Transport), c_void_p, c_void_p, c_size_t, c_int, c_void_p)
    probed = (POINTER(Transport), c_int, c_int, c_void_p, c_void_p)
    _declare(library, c_int, ddl_host_connect=(POINTER(Transport), c_int, c_int))
    _declare(library, c_int, ddl_host_open=opened, ddl_host_all_gather=gathered, ddl_host_probe=probed)
    return library


def failure_with_number(number: int) -> errors.KerasDdlError | None:
    """Returns the error for a failure that the core has stored (ddl_keep_failure), or None if there is none."""
    failure = core().ddl_find_failure(number)
    if not failure:
        return None
    try:
        error: errors.KerasDdlError = failure.contents.error()
        return error
    finally:
        core().ddl_release_failure(failure)


@functools.cache
def cuda() -> ctypes.CDLL:
    """Returns libkeras_ddl_cuda.so, which finds CUDA's driver and NCCL when it opens a device.

    Raises:
        DependencyError: the library is missing or does not load.
    """
    library = _load("libkeras_ddl_cuda.so")
    _declare(library, c_int, ddl_cuda_open=(c_int, c_int, POINTER(Device), c_char_p, c_size_t))
    return library


class _Shim:
    chosen: ctypes.CDLL | None = None


def mpi_families() -> tuple[str, ...]:
    """Returns the families of MPI for which this installation has a shim: "Open MPI", "MPICH", or both."""
    folders = sys.modules["keras_ddl"].__path__
    return tuple(family for family, name in _SHIMS.items() if any((Path(folder) / name).exists() for folder in folders))


def choose_mpi(*families: str) -> str:
    """Loads an MPI shim, which loads its MPI library unless the process already has it. `mpi_shim` then returns it.

    Args:
        families: the families to try, in this order; default: all that are installed.
    Returns: the first family whose shim is installed and finds its MPI library.
    Raises:
        DependencyError: there is no such shim, or its MPI library is missing.
    """
    problems = []
    for family in families or mpi_families():
        if family in mpi_families():
            try:
                _Shim.chosen = _load_shim(_SHIMS[family])
                return family
            except errors.DependencyError as error:
                problems.append(str(error.__cause__))
    if not problems:
        library_path(_SHIMS[families[0] if families else "Open MPI"])  # raises the error
    raise errors.DependencyError(
        f"keras_ddl needs an MPI library to run on several ranks. Received: {'; '.join(problems)}. Load your site's "
        f"MPI module, which sets LD_LIBRARY_PATH, or install MPI in this environment: {packages.install_mpi()}"
    )


@functools.cache
def _load_shim(name: str) -> ctypes.CDLL:
    library = _load(name)
    _declare(library, c_int, ddl_mpi_create=(c_int, POINTER(Transport), c_char_p, c_size_t))
    some_ranks = (POINTER(c_int32), c_int, c_int)
    _declare(library, c_int, ddl_mpi_split=(POINTER(Transport), *some_ranks, POINTER(Transport), c_char_p, c_size_t))
    _declare(library, c_int, ddl_mpi_handle=(POINTER(Transport),))
    _declare(library, None, ddl_mpi_leave=(POINTER(Transport), c_int))
    _declare(library, c_int, ddl_mpi_finalize_at_exit=(), ddl_mpi_exit_status_consensus=(c_int,))
    _declare(library, None, ddl_mpi_no_exit_status_consensus=())
    texts = ("ddl_mpi_library", "ddl_mpi_loaded_version", "ddl_mpi_loaded_path", "ddl_mpi_site_launcher")
    _declare(library, c_char_p, **dict.fromkeys(texts, ()))
    return library


def mpi_shim() -> ctypes.CDLL:
    """Returns the shim that `choose_mpi` loaded, else the first that loads, with its functions declared.

    Raises:
        DependencyError: there is no MPI library.
    """
    if _Shim.chosen is None:
        choose_mpi()
    assert _Shim.chosen is not None
    return _Shim.chosen


def mpi_text(name: str) -> str:
    """Returns the string that a function of the shim returns. `name`: a ddl_mpi_* function without arguments."""
    text: bytes = getattr(mpi_shim(), name)()
    return text.decode(errors="replace")


def mpi_create(fortran_comm: int, transport: Transport) -> None:
    """Fills in the transport of an MPI communicator, given by its Fortran handle. COLLECTIVE over its ranks.

    Raises:
        DependencyError: MPI is not initialised, or has no MPI_THREAD_MULTIPLE.
        CollectiveError: MPI failed.
    """
    message = ctypes.create_string_buffer(ERROR_BYTES)
    code = mpi_shim().ddl_mpi_create(fortran_comm, byref(transport), message, ERROR_BYTES)
    if code:
        kind = errors.DependencyError if code == FAILED_PRECONDITION else errors.CollectiveError
        raise kind(message.value.decode(errors="replace"))


def mpi_split(parent: Transport, ranks: Sequence[int], tag: int, transport: Transport) -> None:
    """Fills in the transport of some ranks of `parent`. COLLECTIVE over them. Raises: CollectiveError: MPI failed."""
    message = ctypes.create_string_buffer(ERROR_BYTES)
    numbers = (c_int32 * len(ranks))(*ranks)
    if mpi_shim().ddl_mpi_split(byref(parent), numbers, len(ranks), tag, byref(transport), message, ERROR_BYTES):
        raise errors.CollectiveError(message.value.decode(errors="replace"))
