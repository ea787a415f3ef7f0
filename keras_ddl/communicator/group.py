"""A communicator: a group of ranks, its collectives on Python objects and arrays, and `split`.

It does not need TensorFlow. Ranks of one communicator match collectives by name; without a name, the n-th barrier of
one rank meets the n-th barrier of the others, and likewise for each kind. Collectives of different communicators never
meet, and do not wait for each other.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from keras_ddl import config
from keras_ddl.communicator.native import binding, requests
from keras_ddl.communicator.native.dtypes import DTYPES
from keras_ddl.communicator.native.started import Started
from keras_ddl.communicator.newcomers import history
from keras_ddl.errors import ConfigError, NotInitializedError, RankLostError
from keras_ddl.topology import Topology, part_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

_PICKLED, _NOT_PICKLED = b"\0", b"\1"
# The longest name of a communicator. It precedes the names of collectives, whose length the core limits.
_MAX_NAME_BYTES = 80

_lock = threading.Lock()
# This rank's GPU, which every communicator has; None: communicators take tensors in the host's memory alone.
_gpu: int | None = None
# The open communicators by id, except the communicator of all ranks.
_open: dict[int, Communicator] = {}
# Numbers the splits of this process, so that ids stay unique even after shutdown and init.
_splits = itertools.count(1)


_of_all_ranks = history.collective(lambda comm: comm.id == binding.WORLD)


class Communicator:
    """A group of ranks, numbered from 0. Made by `keras_ddl.split`; pass it as `comm=` to the collectives.

    Attributes:
        rank: rank of this process in the communicator, 0 <= rank < size.
        size: number of its ranks.
        local_rank: position of this rank among the communicator's ranks on the same host.
        local_size: number of its ranks on this host.
        topology: the layout of its ranks.
        name: the argument of `split`, or "split.1" and so on.
        world_ranks: for each rank, its number among all ranks.
        id: the number by which ops refer to the communicator, equal on all its ranks; 0 for the one of all ranks.

    All methods may be called from any thread. As a context manager it closes the communicator.
    """

    def __init__(
        self,
        native: binding.NativeCommunicator | None,
        place: Topology,
        name: str,
        world_ranks: tuple[int, ...],
        id: int,
    ) -> None:
        self.topology = place
        self.name = name
        self.world_ranks = world_ranks
        self.id = id
        # Precedes the names of its collectives in errors, warnings and timelines.
        self.prefix = f"{name}/" if id != binding.WORLD else ""
        self._native = native
        self._why_closed = f"Communicator {name!r} is closed. Make another one with split(), on all its ranks."
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.rank = place.rank
        self.size = place.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size

    def __repr__(self) -> str:
        state = "" if self._native is not None else ", closed"
        return f"<Communicator {self.name!r}: rank {self.rank} of {self.size}{state}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise ConfigError(
            f"A communicator belongs to the process that created it. Received: {self!r}, to be pickled. Call split() "
            "on every rank instead."
        )

    def split(self, color: int | str | None, key: int = 0, *, name: str | None = None) -> Communicator | None:
        """Returns the communicator of the ranks that pass the same `color`. COLLECTIVE over this communicator.

        Each communicator has its own communication thread, connections and shared memory. Concurrent calls need names.

        Args:
            color: an integer or a string, of one type on all ranks. None: this rank takes no part, and gets None.
            key: new ranks are numbered by ascending key; ranks of equal key keep their order.
            name: shown in error messages, equal on all ranks, at most 80 bytes.

        Raises:
            ConfigError: an invalid color, key or name; on every rank.
            NotInitializedError: this communicator is closed.
        """
        self.native()
        if name is not None and not (isinstance(name, str) and 0 < len(name.encode()) <= _MAX_NAME_BYTES):
            raise ConfigError(f"split: name must be a string of 1 to {_MAX_NAME_BYTES} bytes. Received: name={name!r}.")
        match = self._name("split", name)
        gathered = self._gather((*_checked(color, key), next(_splits)), match)
        _check_split(gathered)
        colors = [color for color, _, _, _ in gathered]
        if color is None:
            return None
        ranks = [r for r, other in enumerate(colors) if other == colors[self.rank]]
        ranks.sort(key=lambda r: gathered[r][1])
        number = _id(f"{self.id} {self.world_ranks} {gathered[0][3]} {match} {color!r}")
        return self._of(ranks, number, name or match.rpartition("/")[2])

    def of_ranks(self, ranks: Sequence[int], *, name: str, deadline_seconds: float | None = None) -> Communicator:
        """Returns the communicator of some ranks. COLLECTIVE over these ranks alone, with equal arguments.

        Args:
            ranks: the ranks, in the order of the new ranks; this one must be among them.
            name: unique among open communicators.
            deadline_seconds: replaces KERAS_DDL_DEADLINE_SECONDS.
        """
        options = {} if deadline_seconds is None else {"deadline_seconds": deadline_seconds}
        return self._of(list(ranks), _id(f"{self.id} {self.world_ranks} {ranks} {name}"), name, **options)

    def _of(self, ranks: list[int], number: int, label: str, **options: Any) -> Communicator:
        place = part_of(self.topology, ranks)
        transport = self.native().sub_transport(ranks, tag=number) if len(ranks) > 1 else None
        world_ranks = tuple(self.world_ranks[r] for r in ranks)
        note = (
            f" (These are ranks of communicator {label!r}: its ranks 0 to {len(ranks) - 1} are ranks "
            f"{', '.join(map(str, world_ranks))} of the job.)"
        )
        options = settings() | options
        native = binding.NativeCommunicator(
            transport, place.group, place.dims[1:], **options, id=number, world_ranks=world_ranks, note=note
        )
        comm = Communicator(native, place, label, world_ranks, number)
        with _lock:
            _open[number] = comm
        return comm

    def without_peers(self, ranks: Sequence[int], *, name: str) -> Communicator:
        """Returns a communicator of some ranks that has their topology and no collectives, for a newcomer."""
        world_ranks = tuple(self.world_ranks[r] for r in ranks)
        comm = Communicator(None, part_of(self.topology, ranks), name, world_ranks, _id(f"{self.id} {ranks} {name}"))
        comm._why_closed = f"Communicator {name!r} has no collectives before this rank has joined the others."
        return comm

    def close(self) -> None:
        """Leaves the other ranks; collectives in which they still wait fail there with RankLostError. Not collective.

        Closing again changes nothing. `keras_ddl.shutdown` closes all communicators; only it closes the communicator
        of all ranks.
        """
        if self.id == binding.WORLD:
            raise ConfigError("close: only keras_ddl.shutdown() closes the communicator of all ranks.")
        self._close(self._why_closed)

    def describe(self) -> str:
        """See `keras_ddl.communicator.describe`."""
        return self.native().describe()

    @_of_all_ranks
    def barrier(self, name: str | None = None) -> None:
        """See `keras_ddl.barrier`."""
        native = self.native()
        native.barrier(self._name("barrier", name))

    def join(self) -> int:
        """See `keras_ddl.join`."""
        last = self.native().join()
        # A rank that joined early has made fewer calls than the others, so all ranks restart their counts.
        with self._lock:
            self._calls.clear()
        return last

    @_of_all_ranks
    def broadcast_object(self, obj: Any, root: int = 0, name: str | None = None) -> Any:
        """See `keras_ddl.broadcast_object`."""
        native = self.native()
        self._check_root(root)
        mine = _pickle(obj) if self.rank == root else b""
        match = self._name("broadcast_object", name)
        parts = native.all_gather_bytes(mine, match, detail=f"broadcast_object from root {root}")
        return obj if self.rank == root and parts[root][:1] == _PICKLED else _unpickle(parts[root], root)

    @_of_all_ranks
    def all_gather_object(self, obj: Any, name: str | None = None) -> list[Any]:
        """See `keras_ddl.all_gather_object`."""
        return self._gather(obj, self._name("all_gather_object", name))

    @_of_all_ranks
    def all_reduce_array(
        self, array: ArrayLike, op: str = "sum", name: str | None = None, *, out: np.ndarray | None = None
    ) -> np.ndarray:
        """See `keras_ddl.communicator.all_reduce_array`."""
        array = self._reducible("all_reduce_array", array, op, out)
        return self.native().all_reduce(array, op, self._name("all_reduce_array", name), out=out)

    def all_reduce_init(
        self, array: np.ndarray, op: str = "sum", name: str | None = None, *, out: np.ndarray | None = None
    ) -> Callable[[], np.ndarray]:
        """See `keras_ddl.communicator.all_reduce_init`."""
        import numpy as np

        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            raise ConfigError(
                "all_reduce_init: the array is read at every call, so it must be a C-contiguous numpy.ndarray. "
                f"Received: {type(array).__name__} on rank {self.rank}. Use np.ascontiguousarray."
            )
        self._reducible("all_reduce_init", array, op, out)
        result = np.empty_like(array) if out is None else out
        return self.native().all_reduce_init(array, op, self._name("all_reduce_init", name), result)

    def _reducible(self, call: str, array: ArrayLike, op: str, out: np.ndarray | None) -> np.ndarray:
        """Returns the array, or raises ConfigError if it cannot be reduced into `out`."""
        import numpy as np

        array = np.asarray(array)
        if op not in requests.OPS:
            raise ConfigError(
                f"{call}: op must be one of {', '.join(map(repr, requests.OPS))}. "
                f"Received: op={op!r} on rank {self.rank}."
            )
        if not binding.is_supported(array):
            raise ConfigError(
                f"{call}: the dtype must be one of {', '.join(DTYPES)}, in native byte order. "
                f"Received: {array.dtype.str} ({array.dtype.name}) on rank {self.rank}. Convert the array first."
            )
        if out is not None and (out.dtype != array.dtype or out.shape != array.shape or not out.flags.c_contiguous):
            raise ConfigError(
                f"{call}: out must be C-contiguous with the dtype and shape of the array, "
                f"{array.dtype.name} {list(array.shape)}. Received: {out.dtype.name} {list(out.shape)} on rank "
                f"{self.rank}."
            )
        return array

    @_of_all_ranks
    def broadcast_array(self, array: ArrayLike, root: int = 0, name: str | None = None) -> np.ndarray:
        """See `keras_ddl.communicator.broadcast_array`."""
        import numpy as np

        native = self.native()
        array = np.asarray(array)
        self._check_root(root)
        if array.dtype.hasobject:
            raise ConfigError(
                f"broadcast_array: the elements must be plain memory. Received: dtype {array.dtype.name} on rank "
                f"{self.rank}. Use broadcast_object."
            )
        return native.broadcast(array, root, self._name("broadcast_array", name))

    def start_alarm(self) -> Started:
        """Cancels the collectives of all ranks until `meet_after_alarm`.

        Every rank calls it once; it is done when all ranks have called it. See DDL_FLAG_CANCELS in ddl.h.
        """
        return self.native().start_barrier(f"{self.prefix}keras_ddl/failed", requests.FLAG_CANCELS)

    def meet_after_alarm(self, obj: Any) -> list[Any]:
        """Returns every rank's object after a failure. COLLECTIVE, when the alarm is done and nothing else is pending.

        Afterwards collectives work as before, even unnamed ones of which some ranks had made fewer calls.
        """
        with self._lock:
            calls = dict(self._calls)
        data, match = _pickle((obj, calls)), f"{self.prefix}keras_ddl/failures"
        parts = self.native().all_gather_bytes(data, match, flags=requests.FLAG_RESUMES)
        gathered = [_unpickle(part, sender) for sender, part in enumerate(parts)]
        with self._lock:
            for _, counts in gathered:
                self._calls |= Counter(counts)
        return [each for each, _ in gathered]

    def native(self) -> binding.NativeCommunicator:
        """Returns the native communicator. Raises NotInitializedError: this one is closed."""
        native = self._native
        if native is None:
            raise NotInitializedError(self._why_closed)
        return native

    def _close(self, why: str) -> None:
        native, self._native, self._why_closed = self._native, None, why
        with _lock:
            _open.pop(self.id, None)
        if native is not None:
            native.close()

    def _gather(self, obj: Any, match: str) -> list[Any]:
        parts = self.native().all_gather_bytes(_pickle(obj), match, detail="all_gather_object")
        return [_unpickle(part, sender) for sender, part in enumerate(parts)]

    def _name(self, kind: str, name: str | None) -> str:
        if name is not None:
            return f"{self.prefix}{kind}/{name}"
        with self._lock:
            self._calls[kind] += 1
            return f"{self.prefix}{kind}.{self._calls[kind]}"

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ConfigError(
                f"root must be a rank, 0 to {self.size - 1}. Received: root={root!r} on rank {self.rank}."
            )


def find(id: int) -> Communicator | None:
    """Returns the open communicator of this id, except the communicator of all ranks."""
    return _open.get(id)


def close_all(why: str) -> None:
    """Closes all communicators except the one of all ranks; later calls raise NotInitializedError(why)."""
    for comm in list(_open.values()):
        comm._close(why)


def forget_all(why: str) -> None:
    """Works like `close_all` in a forked child, without touching memory that the parent uses."""
    global _lock
    _lock = threading.Lock()
    for comm in _open.values():
        comm._native, comm._why_closed = None, why
    _open.clear()


def settings() -> dict[str, Any]:
    """Returns the settings of every native communicator."""
    return {
        "staging_bytes": config.get("STAGING_BYTES"),
        "staged_only": not config.get("CMA"),
        "feedback_bytes": config.get("FEEDBACK_BYTES"),
        "warn_after_seconds": config.get("WARN_AFTER_SECONDS"),
        "deadline_seconds": config.get("DEADLINE_SECONDS"),
        "lost_after_seconds": config.get("LOST_AFTER_SECONDS"),
        "gpu": _gpu,
        "device_mode": config.get("DEVICE"),
    }


def use_gpu(world: Communicator, ordinal: int) -> None:
    """Gives `world`, the communicator of all ranks, and all others this rank's GPU. COLLECTIVE over all ranks.

    Communicators that are made later have it, too. Calling it again changes nothing.
    """
    global _gpu
    if _gpu is not None:
        return
    world.native().add_device(ordinal, config.get("DEVICE"))
    _gpu = ordinal
    for comm in sorted(_open.values(), key=lambda each: each.id):  # in the same order on all ranks
        with contextlib.suppress(RankLostError):  # another rank has closed it
            comm.native().add_device(ordinal, config.get("DEVICE"))


def _id(key: str) -> int:
    """Returns a hash of `key` from 1 to 2**63 - 1."""
    return (int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1) or 1


def _checked(color: Any, key: Any) -> tuple[Any, Any, str]:
    """Returns (color, key, name of the invalid argument or ""). Ranks exchange this, so that all of them raise."""
    wrong = ""
    if not isinstance(color, str) and color is not None:
        try:
            color = None if isinstance(color, bool) else operator.index(color)
        except TypeError:
            color = None
        wrong = "" if color is not None else "color"
    try:
        key = operator.index(key)
    except TypeError:
        key, wrong = 0, wrong or "key"
    return color, key, wrong


def _check_split(gathered: list[tuple[Any, Any, str, int]]) -> None:
    for rank, (_, _, wrong, _) in enumerate(gathered):
        if wrong:
            rule = "an integer, a string or None" if wrong == "color" else "an integer"
            raise ConfigError(f"split: {wrong} must be {rule}. Received: another type on rank {rank}.")
    ranks: dict[str, list[int]] = {}
    for rank, (color, _, _, _) in enumerate(gathered):
        if color is not None:
            ranks.setdefault(type(color).__name__, []).append(rank)
    if len(ranks) > 1:
        received = " and ".join(f"{kind} on rank(s) {some}" for kind, some in ranks.items())
        raise ConfigError(f"split: the colors must be all integers, or all strings. Received: {received}.")


def _pickle(obj: Any) -> bytes:
    """Returns the pickled object, or the error if pickling fails, so that no rank waits in vain."""
    try:
        try:
            return _PICKLED + pickle.dumps(obj, protocol=5)
        except (pickle.PicklingError, AttributeError, TypeError):
            from keras_ddl.communicator import by_value  # for functions of a script or notebook, lambdas, closures

            return _PICKLED + by_value.dumps(obj)
    except Exception as error:
        return _NOT_PICKLED + f"{type(obj).__name__}: {type(error).__name__}: {error}".encode()


def _unpickle(data: bytes, sender: int) -> Any:
    if data[:1] == _NOT_PICKLED:
        raise ConfigError(f"The object must be picklable. Received on rank {sender}: {data[1:].decode()}.")
    return pickle.loads(memoryview(data)[1:])
