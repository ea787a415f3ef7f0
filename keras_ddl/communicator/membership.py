"""Asks the launcher which ranks a job goes on with, after one was lost. The launcher decides (launch/membership.py)."""

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
_NOT_NEEDED = "The job has ended, and does not need this spare."


@dataclass(frozen=True)
class Membership:
    """Which of the launcher's ranks are left.

    Attributes:
        epoch: counts memberships; 0 is that of all.
        ended: the ranks of the membership before that have ended by themselves.
    """

    epoch: int
    members: tuple[int, ...]
    ended: tuple[int, ...] = ()


def can_ask() -> bool:
    """Whether the launcher of this rank goes on when ranks are lost."""
    run_dir = config.get("RUN_DIR")
    return run_dir is not None and (Path(run_dir) / config.MEMBERSHIP_SOCKET).exists()


def after(epoch: int, doorkeeper: Doorkeeper | None = None, admits: Sequence[int] | None = None) -> Membership:
    """Returns the membership that follows `epoch`, once every other rank of it has asked, too, or has ended.

    Args:
        doorkeeper: of this rank, in a job on several hosts: the launcher tells the ranks one another's doors. There the
            first epoch follows -1.
        admits: newcomers that this rank names, or none; None: there must be none among them.

    Raises:
        ConfigError: the launcher was not told that it may go on with fewer ranks.
        RankLostError: too few ranks are left.
    """
    if not can_ask():
        raise ConfigError(
            "regroup: ranks can go on without a lost one where `keras-ddl run` has started them without mpirun, with "
            "--min-np N. Received: a rank that was started otherwise. Restart the job with --restarts instead."
        )
    answer = _ask({"epoch": epoch, "admits": admits, "door": None if doorkeeper is None else doorkeeper.describe()})
    if not answer:
        raise RankLostError("regroup: the launcher ends the job, because too few ranks are left (--min-np).")
    if doorkeeper is not None:
        message = json.loads(answer)
        doors = {int(rank): Door(**door) for rank, door in message["doors"].items()}
        doorkeeper.introduce(Doors(doors, bytes.fromhex(message["secret"])))
    return _membership(answer)


def start() -> Membership:
    """Returns, in a spare, once the job needs it: the membership that it is to join."""
    answer = _ask({"start": True})
    if not answer:
        raise RankLostError(_NOT_NEEDED)
    return _membership(answer)


def join(is_over: Callable[[], bool]) -> Membership | None:
    """Returns, in a newcomer that has come as far as the others, the membership of which it is one.

    None: it is to wait no longer, says `is_over`.
    """
    answer = _ask({"join": True}, is_over)
    if answer is None:
        _ask({"join": False}, lambda: True)
        return None
    if not answer:
        raise RankLostError(_NOT_NEEDED)
    return _membership(answer)


def _membership(answer: bytes) -> Membership:
    message = json.loads(answer)
    return Membership(message["epoch"], tuple(message["members"]), tuple(message.get("ended", ())))


def _ask(question: dict[str, Any], is_over: Callable[[], bool] | None = None) -> bytes | None:
    """Returns the launcher's answer; b"": it has none. None: `is_over`, which is asked now and then, says so."""
    directory = os.open(config.get("RUN_DIR"), os.O_PATH | os.O_DIRECTORY)  # the path may be too long for a socket
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
