"""Asks the launcher which ranks a job goes on with, after one was lost. The launcher decides (launch/membership.py)."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from keras_ddl import config
from keras_ddl.communicator.between_hosts import Door, Doorkeeper, Doors
from keras_ddl.errors import ConfigError, RankLostError

_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Membership:
    """Which of the launcher's ranks are left. `epoch`: counts memberships; 0 is that of all."""

    epoch: int
    members: tuple[int, ...]


def can_ask() -> bool:
    """Whether the launcher of this rank goes on when ranks are lost."""
    run_dir = config.get("RUN_DIR")
    return run_dir is not None and (Path(run_dir) / config.MEMBERSHIP_SOCKET).exists()


def after(epoch: int, doorkeeper: Doorkeeper | None = None) -> Membership:
    """Returns the membership that follows `epoch`, once every other rank of it has asked, too, or has ended.

    Args:
        doorkeeper: of this rank, in a job on several hosts: the launcher tells the ranks one another's doors. There the
            first epoch follows -1.

    Raises:
        ConfigError: the launcher was not told that it may go on with fewer ranks.
        RankLostError: too few ranks are left.
    """
    if not can_ask():
        raise ConfigError(
            "regroup: ranks can go on without a lost one where `keras-ddl run` has started them without mpirun, with "
            "--min-np N. Received: a rank that was started otherwise. Restart the job with --restarts instead."
        )
    directory = os.open(config.get("RUN_DIR"), os.O_PATH | os.O_DIRECTORY)  # the path may be too long for a socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"/proc/self/fd/{directory}/{config.MEMBERSHIP_SOCKET}")
            door = None if doorkeeper is None else doorkeeper.describe()
            connection.send(json.dumps({"epoch": epoch, "door": door}).encode())
            answer = connection.recv(_MESSAGE_BYTES)
    except OSError:
        answer = b""
    finally:
        os.close(directory)
    if not answer:
        raise RankLostError("regroup: the launcher ends the job, because too few ranks are left (--min-np).")
    message = json.loads(answer)
    if doorkeeper is not None:
        doors = {int(rank): Door(**door) for rank, door in message["doors"].items()}
        doorkeeper.introduce(Doors(doors, bytes.fromhex(message["secret"])))
    return Membership(message["epoch"], tuple(message["members"]))
