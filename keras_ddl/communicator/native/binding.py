"""Communicators of the native core, and their collectives on arrays. `requests` runs collectives on raw memory.

This module does not know launchers and topologies; `keras_ddl.communicator` adds them.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_int32, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from keras_ddl import errors
from keras_ddl.communicator.native.dtypes import DTYPES
from keras_ddl.communicator.native.native_library import (
    ABI_VERSION,
    COUNTERS,
    ERROR_BYTES,
    Counters,
    Device,
    Options,
    Request,
    Transport,
    core,
    cuda,
    failure_with_number,
)
from keras_ddl.communicator.native.requests import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    FLAG_ALL_RANKS,
    JOIN,
    OPS,
    PATIENCE_US,
    Memory,
    Requests,
)
from keras_ddl.communicator.native.started import Started
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.communicator.reporting.idleness import Idleness

if TYPE_CHECKING:
    import numpy as np

WORLD = 0  # the id of the communicator of all ranks
_LANE_TAG, _MESSAGES_TAG = 17, 18  # tags of the transports of the lane and of `for_messages`

_DEVICE_MODES = {"auto": 0, "nccl": 1, "staged": 2, "hierarchical": 3}  # ddl_device_mode

_idleness = Idleness()

_CLOSED_BY_HANDLER = "A signal handler closed the communicator in the middle of a collective."


class NativeCommunicator(Requests):
    """A ddl_comm: this process's end of a group of ranks. It owns a communication thread until `close`."""

    def __init__(
        self,
        transport: Transport | None,
        group: Sequence[int],
        outer: Sequence[int] = (),
        *,
        staging_bytes: int,
        staged_only: bool,
        feedback_bytes: int,
        warn_after_seconds: float,
        deadline_seconds: float,
        lost_after_seconds: float,
        gpu: int | None = None,
        device_mode: str = "auto",
        id: int = WORLD,
        world_ranks: Sequence[int] | None = None,
        note: str = "",
    ) -> None:
        """COLLECTIVE over the ranks of `transport`.

        Args:
            transport: connects the ranks; the communicator takes it over. None: a single rank.
            group: see ddl_options in ddl.h, also for the options below.
            outer: the grid of the groups' leaders, fastest dimension first; (): one dimension.
            gpu, device_mode: see `add_device`; None: it has no GPU.
            id: the number by which ops find the communicator; equal on all its ranks.
            world_ranks: the number of each rank among all ranks; None: the same.
            note: text to append to the communicator's error messages.

        Raises:
            CollectiveError: the ranks could not connect.
        """
        library = core()
        message = ctypes.create_string_buffer(ERROR_BYTES)
        self._options = options = Options(
            abi_version=ABI_VERSION,
            group=(c_int32 * len(group))(*group),
            outer=(c_int32 * len(outer))(*outer),
            num_outer=len(outer),
            staging_bytes=staging_bytes,
            staged_only=staged_only,
            feedback_bytes=feedback_bytes,
            warn_after_s=warn_after_seconds,
            deadline_s=deadline_seconds,
            lost_after_s=lost_after_seconds,
        )
        comm = library.ddl_create(None if transport is None else byref(transport), byref(options), message, ERROR_BYTES)
        if not comm:
            raise errors.CollectiveError(message.value.decode(errors="replace"))
        super().__init__(comm, len(group), id, note)
        errors.number_ranks(id, world_ranks)
        self._transport = transport
        self._has_lane = False
        self._splitting = 0
        self._changed = threading.Condition()  # guards _closed and _splitting
        self._process = os.getpid()
        library.ddl_publish(id, self._comm)
        if self._size > 1:
            library.ddl_hold(self._comm)
            threading.Thread(target=_reply_to_queries, args=(self._comm,), name="keras_ddl", daemon=True).start()
        if gpu is not None:
            self.add_device(gpu, device_mode)

    def close(self) -> None:
        """Leaves the group; collectives that still wait on other ranks fail there with RankLostError. Idempotent.

        In a signal handler in the middle of a collective, the collective fails first, with NotInitializedError.
        """
        if self._interruption.is_handling():
            self._interruption.give_up(errors.NotInitializedError(_CLOSED_BY_HANDLER), self.close)
            return
        with self._changed:
            if self._closed:
                return
            self._closed_by = _CLOSED_BY_HANDLER if self._is_in_handler_of_wait() else ""
            self._closed = True
            self._changed.wait_for(lambda: self._splitting == 0)
        left, self._left_join = self._left_join, None
        core().ddl_publish(self._id, None)
        core().ddl_close(self._comm)
        if left is not None:
            core().ddl_work_free(left.work)

    def sub_transport(self, ranks: Sequence[int], tag: int) -> Transport:
        """Returns the transport of some ranks, as Transport.split. COLLECTIVE over `ranks`.

        Raises:
            NotInitializedError: this communicator was closed. CollectiveError: the ranks could not connect.
        """
        with self._changed:
            if self._closed:
                raise errors.NotInitializedError("The communicator was closed while it was split.")
            self._splitting += 1  # closing frees the transport
        try:
            assert self._transport is not None  # a single rank is never split
            return self._transport.split(ranks, tag)
        finally:
            with self._changed:
                self._splitting -= 1
                self._changed.notify_all()

    def for_messages(self) -> Any:
        """Returns an object for messages between the same ranks, with its own transport. COLLECTIVE over them."""
        return self.sub_transport(range(self._size), tag=_MESSAGES_TAG).for_messages()

    def add_lane(self) -> None:
        """Creates once the lane for planned collectives. COLLECTIVE over the ranks.

        Raises:
            NotInitializedError: this communicator was closed. CollectiveError: the ranks could not connect.
        """
        if self._size == 1 or self._has_lane:
            return
        transport = self.sub_transport(range(self._size), tag=_LANE_TAG)
        message = ctypes.create_string_buffer(ERROR_BYTES)
        if core().ddl_add_lane(self._comm, byref(transport), byref(self._options), message, ERROR_BYTES):
            raise errors.CollectiveError(message.value.decode(errors="replace"))
        self._has_lane = True

    def add_device(self, ordinal: int, mode: str, name: str = "keras_ddl/gpu") -> None:
        """Gives this rank the GPU `ordinal`, so that requests may use its memory from then on. COLLECTIVE, once.

        Args:
            mode: KERAS_DDL_DEVICE.
            name: names the collectives in which ranks exchange their devices.

        Raises:
            DependencyError: CUDA's driver or the device is missing. ConfigError: `mode` is "nccl" or "hierarchical",
                and NCCL cannot connect these ranks. CollectiveError: the ranks could not agree.
        """
        device = Device()
        message = ctypes.create_string_buffer(ERROR_BYTES)
        if cuda().ddl_cuda_open(ordinal, mode != "staged", byref(device), message, ERROR_BYTES):
            raise errors.DependencyError(message.value.decode(errors="replace"))
        number = c_uint64()
        arguments = (self._comm, byref(device), _DEVICE_MODES[mode], name.encode(), byref(number))
        if code := core().ddl_add_device(*arguments):
            raise failure_with_number(number.value) or errors.from_code(code, "no memory for the error message")

    def count(self) -> dict[str, int]:
        """Returns this rank's counters (ddl_counters in ddl.h) by name."""
        counters = Counters()
        core().ddl_count(self._comm, byref(counters))
        return {name: getattr(counters, name) for name in COUNTERS}

    def __del__(self) -> None:
        # Freed only here, not in `close`, because another thread may be about to use the communicator.
        if getattr(self, "_comm", None) and os.getpid() == self._process:  # a fork has no communication thread
            self.close()
            core().ddl_release(self._comm)

    def describe(self) -> str:
        """Describes this communicator's topology and memory."""
        text: bytes = core().ddl_describe(self._comm)
        return text.decode(errors="replace")

    def all_reduce(
        self,
        array: np.ndarray,
        op: str,
        name: str,
        *,
        out: np.ndarray | None = None,
        flags: int = 0,
        tolerance: float = 0.0,
        compression: str | None = None,
        feedback: str = "",
    ) -> np.ndarray:
        """Returns `array` reduced over the ranks, in `out` (default: a new array). dtype: in DTYPES; op: in OPS.

        `compression`: one of COMPRESSIONS, for sums and means of float32. `feedback`: see `keras_ddl.all_reduce_n`.
        """
        source = _contiguous(array)
        result = _empty_like(source) if out is None else out
        fields = {"flags": flags, "tolerance": tolerance, "compression": compression, "feedback": feedback}
        self._run(ALL_REDUCE, name, source, result, op=OPS[op], detail=_text(array), **fields)
        return result

    def broadcast(self, array: np.ndarray, root: int, name: str) -> np.ndarray:
        """Returns a copy of rank `root`'s array. Any dtype but object; dtype and shape must be equal on all ranks."""
        source = _contiguous(array)
        result = _empty_like(source)
        self._run(BROADCAST, name, _native_view(source), _native_view(result), root=root, detail=_text(array))
        return result

    def all_gather_bytes(self, data: bytes, name: str, *, detail: str = "", flags: int = 0) -> list[bytes]:
        """Returns the bytes of every rank."""
        import numpy as np

        source = np.frombuffer(data, np.uint8)
        fields = {"detail": detail, "row_count": 1, "rows": len(data)}
        parts: list[bytes] = self._run(ALL_GATHER, name, source, None, flags=FLAG_ALL_RANKS | flags, **fields)
        return parts

    def scatter(self, data: np.ndarray, lengths: Sequence[int], name: str) -> np.ndarray:
        """Returns the bytes that one rank, the root, sends to this rank.

        Args:
            data: on the root, the concatenated bytes (uint8) for rank 0, rank 1, ...; on other ranks empty.
            lengths: on the root, the number of bytes for each rank; on other ranks zeros.
        """
        import numpy as np

        fields = {"row_count": 1, "rows": data.size, "splits": lengths}
        started = self.start(self._request(ALL_TO_ALL, name, data, None, detail="scatter", **fields), data)
        started.wait()
        error = started.error()
        if error is not None:
            raise error
        return np.asarray(started.in_place(sum(started.rows(self._size))))

    def start_barrier(self, name: str, flags: int) -> Started:
        """Starts a barrier that runs in the background."""
        return self.start(self._request(BARRIER, name, None, None, flags=flags), None)

    def barrier(self, name: str) -> None:
        """Returns when every rank has called it."""
        self._run(BARRIER, name, None, None)

    def join(self) -> int:
        """Waits until every rank has joined, and returns the last to join. Continues an interrupted join."""
        import numpy as np

        left, self._left_join = self._left_join, None
        if left is not None:
            self._refuse_in_handler(left.request)
            self._result(left)
            return int(left.keep[1][0])
        last = np.zeros(1, np.int32)
        self._run(JOIN, "join", last, last)
        return int(last[0])

    def all_reduce_init(self, array: np.ndarray, op: str, name: str, out: np.ndarray) -> Callable[[], np.ndarray]:
        """Returns a function that reduces the current content of `array`, which is C-contiguous, into `out`."""
        request = self._request(ALL_REDUCE, name, array, out, op=OPS[op], detail=_text(array))
        # Argument types are not declared, because converting them would take longer than a small exchange.
        try_run = core()["ddl_try_run"]
        comm, reference, patience = c_void_p(self._comm), byref(request), c_uint32(PATIENCE_US)

        def start_and_wait() -> np.ndarray:
            if (ran := try_run(comm, reference, patience)) != 1:
                self._interruption.reraise()
                if not ran:
                    self.submit(request, (array, out))
            return out

        return start_and_wait

    def _run(self, kind: int, name: str, source: Any, result: Any, **fields: Any) -> Any:
        gathered = self.run(self._request(kind, name, source, result, **fields), (source, result))
        return result if gathered is None else gathered

    def _request(self, kind: int, name: str, source: Any, result: Any, **fields: Any) -> Request:
        memory = []
        if source is not None:
            memory = [Memory(source.ctypes.data, None if result is None else result.ctypes.data, source.size)]
        return self.request(kind, name, "float32" if source is None else source.dtype.name, memory, **fields)


def _reply_to_queries(comm: int) -> None:
    library = core()
    stack_position.reply_to_queries(
        lambda: bool(library.ddl_wait_for_position_query(comm)),
        lambda text: library.ddl_reply_position(comm, f"{text}\x1f{_idleness.seconds():.1f}".encode(errors="replace")),
    )
    library.ddl_release(comm)


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
    """Returns the array for a broadcast, or its bytes if its dtype is not in DTYPES: a broadcast only copies."""
    import numpy as np

    if is_supported(array):
        return array
    return array.reshape(math.prod(array.shape)).view(np.uint8)
