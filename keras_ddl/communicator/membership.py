"""Asks the launcher with which ranks a job continues after a loss. The launcher decides (launch/membership.py)."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl import config
from keras_ddl.communicator.between_hosts import Door, Doorkeeper, Doors
from keras_ddl.errors import ConfigError, RankLostError

_MESSAGE_BYTES = 1 << 20
_LOOK_SECONDS = 0.05
_NOT_NEEDED = "The job has ended and does not need this spare."


@dataclass(frozen=True)
class Membership:
    """The launcher's ranks that are left.

    Attributes:
        epoch: counts memberships; epoch 0 has all ranks.
        ended: ranks of the previous membership that have ended by themselves.
        min_ranks: with fewer ranks the job ends.
    """

    epoch: int
    members: tuple[int, ...]
    ended: tuple[int, ...] = ()
    min_ranks: int = 1


def can_ask() -> bool:
    """Whether this rank's launcher lets the job continue when ranks are lost."""
    run_dir = config.get("RUN_DIR")
    return run_dir is not None and (Path(run_dir) / config.MEMBERSHIP_SOCKET).exists()


def enter_job() -> None:
    """Makes this process a rank of a job that may continue without it."""
    if can_ask():
        _in_job_file().touch()


def leave_job() -> None:
    """Tells the launcher that this rank has done its part, so that its end is no failure."""
    if can_ask():
        _in_job_file().unlink(missing_ok=True)


def _in_job_file() -> Path:
    return Path(config.get("RUN_DIR")) / config.IN_JOB_FILE


def after(
    epoch: int,
    doorkeeper: Doorkeeper | None = None,
    admits: Sequence[int] | None = None,
    leaves: str | None = None,
) -> Membership:
    """Returns the membership that follows `epoch` once every other member of `epoch` has asked or has ended.

    Args:
        doorkeeper: this rank's, in a job on several hosts, where the launcher tells the ranks each other's doors and
            the first epoch follows -1.
        admits: newcomers that this rank names, perhaps none; None: the membership must have no newcomers.
        leaves: why this rank should not be a member, after which it ends; None: it stays a member.

    Raises:
        ConfigError: the job was not started to continue with fewer ranks.
        RankLostError: too few ranks are left.
    """
    if not can_ask():
        raise ConfigError(
            "regroup: ranks can continue without a lost rank only if `keras-ddl run -np MIN:MAX` started them, without "
            "mpirun. Received: a rank that was started in another way. Use `keras-ddl run --restarts N` instead."
        )
    question = {"epoch": epoch, "admits": admits, "door": _door(doorkeeper)}
    answer = _ask(question if leaves is None else question | {"leaves": leaves})
    if not answer:
        raise RankLostError("regroup: the launcher ends the job, because too few ranks are left (-np MIN:MAX).")
    return _membership(answer, doorkeeper)


def tell(question: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Sends the launcher a message or question; returns its answer. Raises: RankLostError: there is no launcher."""
    answer = _ask(question, run_dir=run_dir)
    if not answer:
        raise RankLostError("The launcher must run as long as its ranks. Received: no answer from it.")
    told: dict[str, Any] = json.loads(answer)
    return told


def start() -> Membership:
    """Waits, in a spare, until the job needs it; returns the membership that it should join."""
    answer = _ask({"start": True})
    if not answer:
        raise RankLostError(_NOT_NEEDED)
    return _membership(answer)


def join(is_over: Callable[[], bool], doorkeeper: Doorkeeper | None = None) -> Membership | None:
    """Returns, in a newcomer that has caught up with the others, the membership that it has joined.

    None: `is_over` ended the wait. `doorkeeper`: as for `after`.
    """
    answer = _ask({"join": True, "door": _door(doorkeeper)}, is_over)
    if answer is None:
        _ask({"join": False}, lambda: True)
        return None
    if not answer:
        raise RankLostError(_NOT_NEEDED)
    return _membership(answer, doorkeeper)


def _door(doorkeeper: Doorkeeper | None) -> dict[str, object] | None:
    return None if doorkeeper is None else doorkeeper.describe()


def _membership(answer: bytes, doorkeeper: Doorkeeper | None = None) -> Membership:
    message = json.loads(answer)
    if message.get("left"):
        raise SystemExit(0)  # the others go on, and this rank's program has done what it was to do
    if doorkeeper is not None:
        doors = {int(rank): Door(**door) for rank, door in message["doors"].items()}
        doorkeeper.introduce(Doors(doors, bytes.fromhex(message["secret"])))
    ended = tuple(message.get("ended", ()))
    return Membership(message["epoch"], tuple(message["members"]), ended, message.get("min_ranks", 1))


def _ask(
    question: dict[str, Any], is_over: Callable[[], bool] | None = None, *, run_dir: Path | None = None
) -> bytes | None:
    """Returns the launcher's answer; b"": it has none. None: `is_over`, called now and then, ended the wait."""
    # The path may be too long for a socket.
    directory = os.open(run_dir or config.get("RUN_DIR"), os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"/proc/self/fd/{directory}/{config.MEMBERSHIP_SOCKET}")
            connection.send(json.dumps(question).encode())
            while is_over is not None and not select.select([connection], [], [], _LOOK_SECONDS)[0]:
                if is_over():
                    return None
            return connection.recv(_MESSAGE_BYTES)
    except OSError:
        return b""
    finally:
        os.close(directory)
