"""Asks the launcher which ranks continue the job after a loss. The launcher decides (launch/regroup/)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl.communicator.transports.between_hosts import Door, Doorkeeper
from keras_ddl.errors import ConfigError
from keras_ddl.link import program
from keras_ddl.link.kinds import Kind


@dataclass(frozen=True)
class Membership:
    """The ranks, as the launcher numbers them, that make up the job.

    Attributes:
        epoch: counts memberships; epoch 0 has all ranks.
        ended: ranks of the previous membership whose programs ended with status 0.
        min_ranks: the smallest number of ranks with which the job continues.
    """

    epoch: int
    members: tuple[int, ...]
    ended: tuple[int, ...] = ()
    min_ranks: int = 1


def can_ask() -> bool:
    """Whether this rank's launcher lets the job continue when ranks are lost."""
    link = program.current()
    return link is not None and bool(link.job_fact("regroups"))


def enter_job() -> None:
    """Makes this process a rank of a job that may continue without it."""
    if can_ask():
        program.tell(Kind.IN_JOB, {"in_job": True})


def leave_job() -> None:
    """Tells the launcher that this rank is done, so that its exit does not count as a failure."""
    if can_ask():
        program.tell(Kind.IN_JOB, {"in_job": False})


def after(
    epoch: int,
    doorkeeper: Doorkeeper | None = None,
    admits: Sequence[int] | None = None,
    leaves: str | None = None,
) -> Membership:
    """Returns the membership that follows `epoch` once every other member of `epoch` has asked or has ended.

    Args:
        doorkeeper: this rank's Doorkeeper, in a job on several hosts. There the launcher sends all ranks the addresses
            of each other's doors, and the first epoch follows -1.
        admits: newcomers that this rank names, perhaps none; None: the membership must have no newcomers.
        leaves: the reason why this rank leaves and ends; None: it stays a member.

    Raises:
        ConfigError: the job was not started to continue with fewer ranks.
        RankLostError: the launcher ends the job, because too few ranks are left.
    """
    if not can_ask():
        raise ConfigError(
            "regroup: ranks can continue without a lost rank only if `keras-ddl run -np MIN:MAX` started them, without "
            "mpirun. Received: a rank that was started in another way. Use `keras-ddl run --restarts N` instead."
        )
    question = {"epoch": epoch, "admits": admits, "door": _door(doorkeeper)}
    answer = program.opened().ask(question if leaves is None else question | {"leaves": leaves})
    return _membership(answer, doorkeeper)


def start() -> Membership:
    """Waits, in a spare, until the job needs it; returns the membership that it should join."""
    return _membership(program.opened().ask({"start": True}))


def join(is_over: Callable[[], bool], doorkeeper: Doorkeeper | None = None) -> Membership | None:
    """Returns, in a newcomer that has caught up with the others, the membership that it has joined.

    None: `is_over` ended the wait. `doorkeeper`: as for `after`.
    """
    answer = program.opened().ask_until({"join": True, "door": _door(doorkeeper)}, is_over)
    if answer is None:
        program.tell(Kind.QUESTION, {"join": False})
        return None
    return _membership(answer, doorkeeper)


def _door(doorkeeper: Doorkeeper | None) -> dict[str, object] | None:
    return None if doorkeeper is None else doorkeeper.describe()


def _membership(message: dict[str, Any], doorkeeper: Doorkeeper | None = None) -> Membership:
    if message.get("left"):
        raise SystemExit(0)  # the other ranks continue, and this rank's program has succeeded
    if doorkeeper is not None:
        doors = {int(rank): Door(**door) for rank, door in message["doors"].items()}
        doorkeeper.introduce(doors, message["secret"])
    ended = tuple(message.get("ended", ()))
    return Membership(message["epoch"], tuple(message["members"]), ended, message.get("min_ranks", 1))
