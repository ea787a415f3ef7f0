"""Makes the communicator of all ranks (`init`), rebuilds it after a loss (`regroup`), and closes it (`shutdown`)."""

from __future__ import annotations

import atexit
import collections
import os
import threading
from typing import TYPE_CHECKING

from keras_ddl import config
from keras_ddl.communicator import group, meeting, recording
from keras_ddl.communicator.group import Communicator
from keras_ddl.communicator.native import binding
from keras_ddl.communicator.native.native_library import Transport
from keras_ddl.communicator.newcomers import board, history
from keras_ddl.communicator.reporting import child_process, error_report
from keras_ddl.communicator.transports import membership, mpi
from keras_ddl.errors import CollectiveError, ConfigError, DeadlineError, NotInitializedError, RankLostError
from keras_ddl.topology import Topology, make_topology, plain_mode
from keras_ddl.topology.launcher import Launcher, chosen_mode, find_launcher, host_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MEETINGS = 3  # attempts by the same ranks to connect


class _State:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.world: Communicator | None = None
        self.exit_registered = False
        self.forked = False
        self.process: int | None = None  # the process that is a rank
        self.membership: membership.Membership | None = None  # the newest; see regroup


_state = _State()


def init(mode: str | None = None) -> Topology:
    """Joins this process with the other ranks. COLLECTIVE; calling it again changes nothing.

    A process that `keras-ddl run` started on one host, or on several with -np MIN:MAX, needs no MPI. A process that
    mpirun or srun started, even on behalf of `keras-ddl run`, initialises MPI. A process that was started alone is rank
    0 of size 1. Afterwards an uncaught exception ends all ranks.

    Args:
        mode: the topology, 'p' or 'x:LxH[xR]', equal on all ranks (see `parse_mode` of keras_ddl.topology). Default:
            KERAS_DDL_MODE, else the -mode of DDL_OPTIONS, else 'p'.

    Raises:
        ConfigError: the mode or a KERAS_DDL_* variable is wrong, init was called before with another mode, TF_CONFIG
            names a cluster of several tasks and no launcher started this process, or the program uses MPI in a job
            that was started without it.
        DependencyError: MPI or the native library is missing, or does not fit the launcher.
        NotInitializedError: this is a child process of a rank.
        RankMismatchError: the ranks have different modes, settings or versions.
    """
    with _state.lock:
        if _state.world is not None:
            place = _state.world.topology
            if mode is not None and plain_mode(mode) != place.mode:
                raise ConfigError(
                    f"init: the mode of a running job cannot change. Received: mode={mode!r} on rank {place.rank}, "
                    f"initialised with {place.mode!r}. Call keras_ddl.shutdown() on every rank first."
                )
            return place
        if _state.forked:
            raise NotInitializedError(_FORKED)
        config.check_environment()
        mode = chosen_mode() if mode is None else mode
        launcher = find_launcher()
        transport: Transport | None = None
        if launcher is not None and launcher.directory is not None and (launcher.size != 1 or launcher.is_spare):
            child_process.refuse(launcher.rank)
            meeting.refuse_mpi()
            own_board = board.current()
            if launcher.is_spare and own_board is not None:
                _state.membership = membership.start()
                place = meeting.newcomer_topology(launcher)
                history.begin(history.Replay(own_board))
            else:
                # After shutdown, `init` connects the ranks that remained before.
                _state.membership = _state.membership or meeting.first_membership(launcher)
                place, transport = meeting.without_mpi(launcher, mode, _state.membership)
                history.begin(None if own_board is None else history.Record(own_board, [], 0))
            child_process.mark_rank()
        elif mpi.running() or (launcher is not None and launcher.size != 1):
            child_process.refuse(None if launcher is None else launcher.rank)
            place, transport = meeting.by_mpi(mpi.start(launcher), mode)
            child_process.mark_rank()
        else:
            meeting.check_alone_on_purpose(launcher)
            error_report.install(0, abort=None)
            place = make_topology(0, [host_key()], mode)
        _open_world(place, transport)
        membership.enter_job()
        _state.process = os.getpid()
        if config.get("TIMELINE"):
            recording.start(config.get("TIMELINE"), place.rank)
        if not _state.exit_registered:
            # This runs before MPI_Finalize, which follows all atexit functions.
            atexit.register(shutdown)
            os.register_at_fork(after_in_child=_after_fork_in_child)
            _state.exit_registered = True
        return place


def _open_world(place: Topology, transport: Transport | None, note: str = "") -> None:
    # A newcomer that has not joined yet has a rank among the others, but a communicator of its own.
    alone = make_topology(0, [host_key()], place.mode) if transport is None else place
    native = binding.NativeCommunicator(transport, alone.group, alone.dims[1:], **group.settings(), note=note)
    _state.world = Communicator(native, place, "world", tuple(range(place.size)), binding.WORLD)


def regroup() -> Topology:
    """Rebuilds the communicator of all ranks from the ranks that remain after a loss. COLLECTIVE over them.

    For a program that catches RankLostError and continues. The remaining ranks are numbered from 0 in their order, and
    pending collectives are dropped. Communicators made by `split` close; data of the lost rank alone is lost. The
    job must have been started by `keras-ddl run -np MIN:MAX`, without mpirun.

    The launcher kills a rank that neither calls this nor ends within KERAS_DDL_DEADLINE_SECONDS of the first call.
    Afterwards the job takes no newcomers.

    Raises:
        ConfigError: the job was started in another way, or with a mode that has dimensions.
        RankLostError: fewer than MIN ranks are left, or they cannot reach each other.
    """
    recorded = history.current()
    if isinstance(recorded, history.Record):
        recorded.close("keras_ddl.regroup(), which the other ranks have called but a newcomer does not call")
    return regroup_with()


def regroup_with(admits: Sequence[int] | None = None) -> Topology:
    """Works like `regroup`, but the ranks that meet may include newcomers. COLLECTIVE.

    admits: the newcomers that this rank admits, maybe []; None: there must be no newcomers.
    """
    with _state.lock:
        launcher = _check_can_regroup()
        return _meet(launcher, lambda: meeting.next_membership(launcher, epoch(), admits))


def leave(why: str) -> Topology:
    """Ends this rank with status 0; the others call `regroup_with` and continue without it. COLLECTIVE over all.

    Args:
        why: the reason, which the launcher shows.
    Returns: only if all other ranks are lost meanwhile. This rank then continues, perhaps with other leaving ranks.
    """
    with _state.lock:
        launcher = _check_can_regroup()
        asked = iter([why])
        return _meet(launcher, lambda: meeting.next_membership(launcher, epoch(), None, next(asked, None)))


def join_others(is_over: Callable[[], bool]) -> Topology | None:
    """In a newcomer: connects to the ranks that admit it. COLLECTIVE over them and the newcomer.

    Returns None if `is_over` ended the wait.
    """
    with _state.lock:
        launcher = _check_can_regroup()
        members = meeting.joined_membership(launcher, is_over)
        if members is None:
            return None
        asked = iter([members])
        return _meet(launcher, lambda: next(asked, None) or meeting.next_membership(launcher, epoch()))


def _check_can_regroup() -> Launcher:
    place, launcher = topology(), find_launcher()
    if launcher is None or place.mode != "p":
        raise ConfigError(
            f"regroup: a mode with dimensions needs a fixed number of ranks. Received: mode {place.mode!r} on rank "
            f"{place.rank}. Use mode 'p'."
        )
    return launcher


def _meet(launcher: Launcher, ask: Callable[[], membership.Membership]) -> Topology:
    """Rebuilds the communicator of all ranks with the membership that `ask` returns."""
    attempts: collections.Counter[tuple[int, ...]] = collections.Counter()
    _close_world()  # the timeline continues
    while True:
        members = _state.membership = ask()
        try:
            place, transport = meeting.without_mpi(launcher, "p", members)
            started_as = ", ".join(map(str, members.members))
            _open_world(place, transport, f" (Ranks 0 to {place.size - 1} were started as ranks {started_as}.)")
        except (RankLostError, DeadlineError, CollectiveError):  # another rank was lost or hung meanwhile
            attempts[members.members] += 1
            if attempts[members.members] == _MEETINGS:  # all are alive but cannot connect
                raise
            continue
        return place


def shutdown() -> None:
    """Leaves the other ranks; collectives in which they still wait fail there with RankLostError. Not collective.

    Closes all communicators. Runs automatically at the end of the process. Afterwards every rank may call `init`
    again.
    """
    with _state.lock:
        if _close_world():
            recording.leave()
            history.end()
        if _state.process == os.getpid():  # a forked child is no rank
            membership.leave_job()


def _close_world() -> bool:
    """Closes all communicators; returns whether there were any."""
    world, _state.world = _state.world, None
    if world is not None:
        group.close_all(_NOT_YET)
        world._close(_NOT_YET)
    return world is not None


def use_gpu(ordinal: int) -> None:
    """Gives this rank's GPU to all communicators, so that collectives take tensors on it. COLLECTIVE over all ranks.

    Calling it again changes nothing.

    Raises: see `NativeCommunicator.add_device`.
    """
    with _state.lock:
        group.use_gpu(communicator_of(None), ordinal)


def is_initialized() -> bool:
    """Whether `init` was called, without a later `shutdown`."""
    return _state.world is not None


def topology() -> Topology:
    """Returns the layout of the ranks. Raises NotInitializedError before `init`, as all functions below do."""
    return communicator_of(None).topology


def epoch() -> int:
    """Returns how often the communicator of all ranks has been rebuilt (`regroup`)."""
    return 0 if _state.membership is None else _state.membership.epoch


def min_ranks() -> int:
    """Returns the smallest number of ranks with which the launcher lets the job continue."""
    return 1 if _state.membership is None else _state.membership.min_ranks


def members() -> tuple[int, ...]:
    """Returns the launcher's number of each rank."""
    return tuple(range(topology().size)) if _state.membership is None else _state.membership.members


def any_rank_ended() -> bool:
    """Whether, at the last `regroup`, some ranks were missing because they had ended normally."""
    return _state.membership is not None and bool(_state.membership.ended)


def communicator_of(comm: Communicator | None) -> Communicator:
    """Returns `comm`, or the communicator of all ranks for None.

    Raises:
        ConfigError: `comm` is not a communicator. NotInitializedError: it is closed, or `init` was not called.
    """
    if comm is None:
        comm = _state.world
        if comm is None:
            raise NotInitializedError(_FORKED if _state.forked else _NOT_YET)
    elif not isinstance(comm, Communicator):
        raise ConfigError(
            f"comm must be a communicator that keras_ddl.split() made, or None for all ranks. Received: comm={comm!r}."
        )
    comm.native()
    return comm


def communicator_with_id(id: int) -> Communicator:
    """Returns the open communicator with this id, for an op in a graph. Raises NotInitializedError: there is none."""
    comm = communicator_of(None) if id == binding.WORLD else group.find(id)
    if comm is None:
        raise NotInitializedError(
            "The communicator of a traced collective does not exist: it was closed, or this rank takes no part in it. "
            "Make it again with keras_ddl.split(), and trace the function again."
        )
    return comm


_NOT_YET = (
    "keras_ddl.init() must be called first (Strategy() calls it), and shutdown() must not have been called since."
)
_FORKED = (
    "This process was forked from a rank after keras_ddl.init(): it has no communication thread and is not a rank. "
    "Leave collectives to the parent."
)


def _after_fork_in_child() -> None:
    # The communication thread exists in the parent only: drop it without touching memory that the parent uses.
    _state.lock = threading.RLock()
    _state.forked = _state.forked or _state.world is not None
    _state.world = None
    group.forget_all(_FORKED)
