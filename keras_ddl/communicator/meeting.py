"""Connects the ranks, with or without MPI, and checks that their modes, settings and versions are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keras_ddl import config
from keras_ddl.communicator.native.native_library import Transport
from keras_ddl.communicator.reporting import error_report, stack_position
from keras_ddl.communicator.transports import host, membership, mpi
from keras_ddl.communicator.transports.membership import Membership
from keras_ddl.errors import ConfigError, RankLostError, RankMismatchError
from keras_ddl.topology import Topology, make_topology, tf_config
from keras_ddl.topology.launcher import Launcher, allocation_size, host_key, local_place

if TYPE_CHECKING:
    from mpi4py import MPI


def by_mpi(world: MPI.Intracomm, mode: str) -> tuple[Topology, Transport]:
    """Connects the ranks of an MPI communicator. COLLECTIVE."""
    error_report.install(world.rank, mpi.abort, mpi.no_pending_exit_status)
    place = _agree(world, mode)
    if not all(world.allgather(mpi.finalises)):
        mpi.no_exit_status_consensus()
    return place, mpi.transport(world)


def first_membership(launcher: Launcher) -> Membership:
    """Returns the first membership of a job without MPI. COLLECTIVE if the job is on several hosts."""
    assert launcher.size is not None
    if launcher.num_hosts == 1:
        return Membership(0, tuple(range(launcher.size)))
    first = next_membership(launcher, -1)
    if len(first.members) != launcher.size:
        left = sorted(set(range(launcher.size)) - set(first.members))
        raise RankLostError(
            f"rank(s) {left} have left: their programs ended before all ranks had connected. Every rank must call "
            "keras_ddl.init() (Strategy() does it)."
        )
    return first


def next_membership(
    launcher: Launcher, epoch: int, admits: Sequence[int] | None = None, leaves: str | None = None
) -> Membership:
    """Returns the membership after `epoch`; see `membership.after`. COLLECTIVE over the remaining ranks."""
    return membership.after(epoch, host.doorkeeper(launcher), admits, leaves)


def joined_membership(launcher: Launcher, is_over: Callable[[], bool]) -> Membership | None:
    """Returns the membership that a newcomer has joined; see `membership.join`. COLLECTIVE over its ranks."""
    return membership.join(is_over, host.doorkeeper(launcher))


def without_mpi(launcher: Launcher, mode: str, members: Membership) -> tuple[Topology, Transport | None]:
    """Connects the ranks of a membership. COLLECTIVE over them."""
    # An abort need not wait for other ranks, because the launcher sees how each rank ended.
    error_report.install(launcher.rank, host.abort)
    if len(members.members) == 1:
        return make_topology(0, [host_key()], mode), None
    world = host.start(launcher, members)
    try:
        return _agree(world, mode), world
    except BaseException:
        world.destroy()
        raise


def newcomer_topology(launcher: Launcher) -> Topology:
    """Returns the topology of a newcomer until it catches up with the other ranks.

    In this topology, the newcomer's rank is never 0, because rank 0 writes; the launcher has chosen its local rank; and
    there are as many ranks as when the job began, at least 2.
    """
    error_report.install(launcher.rank, host.abort)
    size = launcher.size or 1
    local_rank, local_size = local_place()
    here = max(1, min(local_size, size))
    rank = size - here + min(local_rank, here - 1)
    return make_topology(rank or size - 1, ["another host"] * (size - here) + [host_key()] * here, "p")


def refuse_mpi() -> None:
    """Raises ConfigError if the program has initialised MPI in a rank that was started without MPI."""
    if mpi.running():
        raise ConfigError(
            "A program that uses MPI itself needs ranks that mpirun has started. Received: mpi4py has initialised MPI "
            "in a rank that `keras-ddl run` has started without it, so its COMM_WORLD has size 1. Start the job with "
            "`keras-ddl run --mpirun mpirun ...` (or KERAS_DDL_MPIRUN=mpirun)."
        )


def _agree(world: MPI.Intracomm | host.HostTransport, mode: str) -> Topology:
    """Exchanges hosts and compares settings before the native communicator is made. COLLECTIVE."""
    mine = {
        "mode": mode,
        "version of keras_ddl": config.version(),
        "KERAS_DDL_STAGING_BYTES": config.get("STAGING_BYTES"),
        "KERAS_DDL_CMA": config.get("CMA"),
        "KERAS_DDL_WARN_AFTER_SECONDS": config.get("WARN_AFTER_SECONDS"),
        "KERAS_DDL_DEADLINE_SECONDS": config.get("DEADLINE_SECONDS"),
        "KERAS_DDL_LOST_AFTER_SECONDS": config.get("LOST_AFTER_SECONDS"),
    }
    gathered = world.allgather((host_key(), config.get("RACK"), mine))
    for setting in mine:
        ranks_by_value: dict[str, list[int]] = {}
        for other, (_, _, settings) in enumerate(gathered):
            ranks_by_value.setdefault(repr(settings[setting]), []).append(other)
        if len(ranks_by_value) > 1:
            received = "; ".join(f"{value} on rank(s) {ranks}" for value, ranks in ranks_by_value.items())
            raise RankMismatchError(f"init: the {setting} must be equal on all ranks. Received: {received}.")
    hosts, racks, _ = zip(*gathered)
    return make_topology(world.rank, hosts, mode, racks)


def check_alone_on_purpose(launcher: Launcher | None) -> None:
    """Raises ConfigError if TF_CONFIG names several tasks; warns in a Slurm allocation of several tasks."""
    if launcher is None:
        tf_config.check_not_one_of_a_cluster()
    tasks = allocation_size()
    if tasks is not None and tasks > 1:
        stack_position.warn(
            f"keras_ddl runs alone (rank 0 of size 1) inside a Slurm allocation of {tasks} tasks. If the ranks were "
            "meant to work together, start the script with `keras-ddl run`, mpirun, or srun --mpi=pmix "
            "(MPICH: --mpi=pmi2).",
            RuntimeWarning,
        )
