"""This process as one of the ranks: init, shutdown, who and how many, and collectives on Python objects and arrays.

Nothing here needs TensorFlow. Collectives are matched between the ranks by name; without a name, the n-th barrier of
one rank meets the n-th barrier of the others, and so on for each kind.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from keras_ddl import _environment, _error_report, _mpi, _native, config
from keras_ddl.errors import ConfigError, NotInitializedError, RankMismatchError
from keras_ddl.topology import Topology, make_topology

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

_PICKLED, _NOT_PICKLED = b"\0", b"\1"


class _State:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.topology: Topology | None = None
        self.comm: _native.Communicator | None = None
        self.calls: Counter[str] = Counter()
        self.exit_registered = False
        self.forked = False


_state = _State()


def init(mode: str | None = None) -> Topology:
    """Joins this process with the other ranks. COLLECTIVE; calling it again changes nothing.

    Started by mpirun, srun or `keras-ddl run`, the ranks are those of the job and MPI is initialised. Started alone,
    this is rank 0 of size 1, without MPI. From then on an uncaught exception ends all ranks.

    Args:
        mode: the topology, 'p' or 'x:LxH[xR]', equal on all ranks (see `keras_ddl.topology.parse_mode`). Default:
            KERAS_DDL_MODE, else the -mode of DDL_OPTIONS, else 'p'.

    Raises:
        ConfigError: the mode or a KERAS_DDL_* variable is wrong, or this was called before with another mode.
        DependencyError: MPI or the native library is missing, or does not fit the launcher.
        RankMismatchError: the ranks were given different modes or settings.
    """
    with _state.lock:
        if _state.topology is not None:
            if mode is not None and mode != _state.topology.mode:
                raise ConfigError(
                    f"init: the mode of a running job cannot change. Received: mode={mode!r} on rank "
                    f"{_state.topology.rank}, initialised with {_state.topology.mode!r}. Call keras_ddl.shutdown() on "
                    "every rank first."
                )
            return _state.topology
        if _state.forked:
            raise NotInitializedError(_FORKED)
        config.check_environment()
        mode = config.mode_from_environment() if mode is None else mode
        launcher = _environment.launcher()
        if _mpi.running() or (launcher is not None and launcher.size != 1):
            topology, fortran_comm = _meet(_mpi.start(launcher), mode)
        else:
            _warn_if_alone_by_mistake()
            _error_report.install(0, abort=None)
            topology, fortran_comm = make_topology(0, [_environment.host_key()], mode), None
        _state.comm = _native.Communicator(
            fortran_comm,
            topology.group,
            staging_bytes=config.get("STAGING_BYTES"),
            warn_after_seconds=config.get("WARN_AFTER_SECONDS"),
            deadline_seconds=config.get("DEADLINE_SECONDS"),
            lost_after_seconds=config.get("LOST_AFTER_SECONDS"),
        )
        _state.topology = topology
        _state.calls.clear()
        if config.get("TIMELINE"):
            from keras_ddl import timeline

            timeline.start(config.get("TIMELINE"))
        if not _state.exit_registered:
            # Before MPI_Finalize, which mpi4py runs after every atexit function.
            atexit.register(shutdown)
            os.register_at_fork(after_in_child=_after_fork_in_child)
            _state.exit_registered = True
        return topology


def shutdown() -> None:
    """Leaves the other ranks; a collective they still wait in fails there with RankLostError. Not collective.

    Runs by itself at the end of the process. Afterwards `init` may be called again, on every rank.
    """
    with _state.lock:
        comm, _state.comm, _state.topology = _state.comm, None, None
        if comm is not None:
            comm.close()
            from keras_ddl import timeline

            timeline.stop()


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return _state.topology is not None


def topology() -> Topology:
    """Returns where the ranks are. Raises NotInitializedError before `init`, as all functions below do."""
    found = _state.topology
    if found is None:
        raise NotInitializedError(_FORKED if _state.forked else _NOT_YET)
    return found


def rank() -> int:
    """Returns the number of this process, 0 <= rank < size."""
    return topology().rank


def size() -> int:
    """Returns the number of ranks."""
    return topology().size


def local_rank() -> int:
    """Returns the position of this rank among the ranks of its host: what to choose a device by."""
    return topology().local_rank


def local_size() -> int:
    """Returns the number of ranks on this rank's host."""
    return topology().local_size


def num_hosts() -> int:
    """Returns the number of hosts that run a rank."""
    return topology().num_hosts


def describe() -> str:
    """Returns what collectives run on, for people: the box of ranks, the shared memory, the instruction set."""
    return _communicator().describe()


def barrier(name: str | None = None) -> None:
    """Returns when every rank has called it. COLLECTIVE."""
    comm = _communicator()
    comm.barrier(_name("barrier", name))


def broadcast_object(obj: Any, root: int = 0, name: str | None = None) -> Any:
    """Returns the object of rank `root`, pickled; the argument of other ranks is ignored. COLLECTIVE.

    Raises:
        ConfigError: `root` is no rank, or (on every rank) rank `root`'s object cannot be pickled.
    """
    comm = _communicator()
    _check_root(root)
    mine = _pickle(obj) if rank() == root else b""
    parts = comm.all_gather_bytes(mine, _name("broadcast_object", name), detail=f"broadcast_object from root {root}")
    return obj if rank() == root and parts[root][:1] == _PICKLED else _unpickle(parts[root], root)


def all_gather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, by rank, pickled. COLLECTIVE.

    Raises:
        ConfigError: some rank's object cannot be pickled (on every rank).
    """
    comm = _communicator()
    parts = comm.all_gather_bytes(_pickle(obj), _name("all_gather_object", name), detail="all_gather_object")
    return [_unpickle(part, sender) for sender, part in enumerate(parts)]


def all_reduce_array(
    array: ArrayLike, op: str = "sum", name: str | None = None, *, out: np.ndarray | None = None
) -> np.ndarray:
    """Returns `array`, reduced elementwise over the ranks. COLLECTIVE.

    Args:
        array: dtype float16, bfloat16, float32, float64, int32, int64, uint8 or int8; dtype and shape equal on all
            ranks.
        op: "sum", "mean", "min", "max" or "product". Integer means are rounded toward zero.
        out: where the result goes: `array` itself, or an array of its dtype and shape, C-contiguous, that does not
            overlap it. Default: a new array.

    Raises:
        ConfigError: another dtype or op, or an `out` that does not fit.
        RankMismatchError: the ranks disagree; on every rank.
    """
    import numpy as np

    comm = _communicator()
    array = np.asarray(array)
    if op not in _native.OPS:
        raise ConfigError(
            f"all_reduce_array: op must be one of {', '.join(map(repr, _native.OPS))}. "
            f"Received: op={op!r} on rank {rank()}."
        )
    if not _native.is_supported(array):
        raise ConfigError(
            f"all_reduce_array: the dtype must be one of {', '.join(_native.DTYPES)}, in native byte order. "
            f"Received: {array.dtype.str} ({array.dtype.name}) on rank {rank()}. Convert the array first."
        )
    if out is not None and (out.dtype != array.dtype or out.shape != array.shape or not out.flags.c_contiguous):
        raise ConfigError(
            f"all_reduce_array: out must be C-contiguous with the dtype and shape of the array, {array.dtype.name} "
            f"{list(array.shape)}. Received: {out.dtype.name} {list(out.shape)} on rank {rank()}."
        )
    return comm.all_reduce(array, op, _name("all_reduce_array", name), out=out)


def broadcast_array(array: ArrayLike, root: int = 0, name: str | None = None) -> np.ndarray:
    """Returns a new array: that of rank `root`. COLLECTIVE.

    Args:
        array: any dtype but object; dtype and shape equal on all ranks.

    Raises:
        ConfigError: `root` is no rank, or the dtype is object.
        RankMismatchError: the ranks disagree; on every rank.
    """
    import numpy as np

    comm = _communicator()
    array = np.asarray(array)
    _check_root(root)
    if array.dtype.hasobject:
        raise ConfigError(
            f"broadcast_array: the elements must be plain memory. Received: dtype {array.dtype.name} on rank "
            f"{rank()}. Use broadcast_object."
        )
    return comm.broadcast(array, root, _name("broadcast_array", name))


_NOT_YET = "keras_ddl.init() must be called first (Strategy() does it), and shutdown() not since."
_FORKED = (
    "This process was forked from a rank after keras_ddl.init(): it has no communication thread and is not a rank. "
    "Use multiprocessing's 'spawn' or 'forkserver', or leave collectives to the parent."
)


def _communicator() -> _native.Communicator:
    topology()
    return _state.comm


def _name(kind: str, name: str | None) -> str:
    if name is not None:
        return f"{kind}/{name}"
    with _state.lock:
        _state.calls[kind] += 1
        return f"{kind}.{_state.calls[kind]}"


def _check_root(root: int) -> None:
    if not 0 <= root < size():
        raise ConfigError(f"root must be a rank, 0 to {size() - 1}. Received: root={root!r} on rank {rank()}.")


def _pickle(obj: Any) -> bytes:
    """The object with a mark in front; what cannot be pickled travels as text, so that no rank waits in vain."""
    try:
        try:
            return _PICKLED + pickle.dumps(obj, protocol=5)
        except (pickle.PicklingError, AttributeError, TypeError):
            import cloudpickle  # functions of a script or a notebook, lambdas, closures

            return _PICKLED + cloudpickle.dumps(obj, protocol=5)
    except Exception as error:
        return _NOT_PICKLED + f"{type(obj).__name__}: {type(error).__name__}: {error}".encode()


def _unpickle(data: bytes, sender: int) -> Any:
    if data[:1] == _NOT_PICKLED:
        raise ConfigError(f"The object must be picklable. Received on rank {sender}: {data[1:].decode()}.")
    return pickle.loads(memoryview(data)[1:])


def _meet(world: Any, mode: str) -> tuple[Topology, int]:
    """Exchanges what must be known or equal before the native communicator is made. COLLECTIVE."""
    _error_report.install(world.rank, abort=_mpi.abort)
    from keras_ddl import __version__

    mine = {
        "mode": mode,
        "version of keras_ddl": __version__,
        "KERAS_DDL_STAGING_BYTES": config.get("STAGING_BYTES"),
        "KERAS_DDL_WARN_AFTER_SECONDS": config.get("WARN_AFTER_SECONDS"),
        "KERAS_DDL_DEADLINE_SECONDS": config.get("DEADLINE_SECONDS"),
        "KERAS_DDL_LOST_AFTER_SECONDS": config.get("LOST_AFTER_SECONDS"),
    }
    everybody = world.allgather((_environment.host_key(), mine))
    for setting in mine:
        ranks_by_value: dict[str, list[int]] = {}
        for other, (_, settings) in enumerate(everybody):
            ranks_by_value.setdefault(repr(settings[setting]), []).append(other)
        if len(ranks_by_value) > 1:
            received = "; ".join(f"{value} on rank(s) {ranks}" for value, ranks in ranks_by_value.items())
            raise RankMismatchError(f"init: the {setting} must be equal on all ranks. Received: {received}.")
    return make_topology(world.rank, [host for host, _ in everybody], mode), world.py2f()


def _warn_if_alone_by_mistake() -> None:
    tasks = _environment.allocation_size()
    if tasks is not None and tasks > 1:
        warnings.warn(
            f"keras_ddl runs alone (rank 0 of size 1) inside a Slurm allocation of {tasks} tasks. If the ranks were "
            "meant to work together, start the script with `keras-ddl run`, mpirun, or srun --mpi=pmix.",
            RuntimeWarning,
            stacklevel=3,
        )


def _after_fork_in_child() -> None:
    # The communication thread exists in the parent only: forget it without touching what the parent uses.
    _state.lock = threading.RLock()
    _state.forked = _state.forked or _state.topology is not None
    _state.comm = _state.topology = None
