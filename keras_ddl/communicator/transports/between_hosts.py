"""Connects ranks of different hosts without MPI: a stream socket between each pair, which the native transport takes.

Every rank listens on a port, its door, as long as its process lives. The launcher tells every rank the doors of all
ranks (membership.py). In each pair, the higher rank connects to the lower rank's door, with the handshake of all
connections of a job (link/handshake.py). One thread serves the door and never waits for a peer.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from keras_ddl import config
from keras_ddl.config import Seconds
from keras_ddl.errors import RankLostError
from keras_ddl.link.connections import keep_alive
from keras_ddl.link.handshake import Impostor, introduce
from keras_ddl.link.listener import Caller, Listener
from keras_ddl.link.loop import READ, Source, serve
from keras_ddl.topology.launcher import host_key

_SWEEP_SECONDS = 1.0


@dataclass(frozen=True)
class Door:
    """The address of a rank. `host`: equal for ranks that share memory."""

    address: str
    port: int
    host: str


class Doorkeeper:
    """This process's door, which a separate thread serves."""

    def __init__(self, rank: int, size: int = 1) -> None:
        """`rank`: the launcher's number of this rank. `size`: the job's size. Raises: OSError: cannot open a port."""
        self.rank = rank
        self._doors: dict[int, Door] = {}  # the launcher's number of a rank -> its door
        self._secret = ""
        self._door = socket.create_server(("", 0), backlog=1024)
        self._changed = threading.Condition()  # guards the attributes below
        self._arrived: dict[tuple[str, int], socket.socket] = {}
        self._given_up: set[str] = set()
        self._introduced = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = Listener(self._door, "", size)  # only the door's thread uses it
        threading.Thread(target=self._serve, name="keras_ddl-door", daemon=True).start()

    def describe(self) -> dict[str, object]:
        """Returns the facts about this door that the launcher passes on to the other ranks."""
        return {"port": self._door.getsockname()[1], "host": host_key()}

    def introduce(self, doors: dict[int, Door], secret: str) -> None:
        """Sets the doors of all ranks. Earlier connections wait for this call."""
        with self._changed:
            self._doors, self._secret = doors, secret
        os.eventfd_write(self._introduced, 1)

    def others(self, world_ranks: Sequence[int]) -> list[int]:
        """Returns those of `world_ranks` that are on other hosts."""
        here = self._doors[self.rank].host
        return [rank for rank in world_ranks if self._doors[rank].host != here]

    def connect(
        self, key: str, world_ranks: Sequence[int], check: Callable[[list[int]], None]
    ) -> dict[int, socket.socket]:
        """Returns connections with the ranks of other hosts, by the launcher's numbers. COLLECTIVE over `world_ranks`.

        Args:
            key: identifies this transport; equal on all ranks and never used before.
            check: called ten times a second with the ranks that are not connected yet. May raise.

        Raises: RankLostError: a rank died, cannot be reached, or has given up.
        """
        connected: dict[int, socket.socket] = {}
        others = self.others(world_ranks)
        try:
            for rank in others:
                if rank < self.rank:
                    connected[rank] = self._knock(rank, key)
            self._wait_for([rank for rank in others if rank > self.rank], key, connected, check)
        except BaseException:
            with self._changed:
                self._given_up.add(key)  # for threads of other ranks that will wait for this rank
                for arrived in [at for at in self._arrived if at[0] == key]:
                    self._arrived.pop(arrived).close()
            for connection in connected.values():
                connection.close()
            raise
        for connection in connected.values():
            _configure(connection)
        return connected

    def _wait_for(
        self,
        ranks: list[int],
        key: str,
        connected: dict[int, socket.socket],
        check: Callable[[list[int]], None],
    ) -> None:
        check_at = time.monotonic() + Seconds.LOOK_AGAIN
        while True:
            with self._changed:
                for rank in ranks:
                    if (key, rank) in self._arrived:
                        connected[rank] = self._arrived.pop((key, rank))
                missing = [rank for rank in ranks if rank not in connected]
                if not missing:
                    return
                self._changed.wait(0.1)
            check(missing)
            if time.monotonic() >= check_at:
                for rank in missing:
                    self._knock(rank, key, is_look=True).close()
                check_at = time.monotonic() + Seconds.LOOK_AGAIN

    def _knock(self, rank: int, key: str, *, is_look: bool = False) -> socket.socket:
        """Connects to a rank. `is_look`: only checks whether it still waits."""
        door = self._doors[rank]
        where = f"its process does not answer on port {door.port} of {door.address}"

        def connect() -> socket.socket:
            try:
                return socket.create_connection((door.address, door.port), timeout=Seconds.MEET)
            except OSError as error:
                raise RankLostError(
                    f"rank {rank} died, or cannot be reached: {where} ({error}). Ranks need TCP connections between "
                    "all hosts."
                ) from None

        hello = {"key": key, "from": self.rank, "to": rank, "is_look": is_look}
        try:
            channel, answer = introduce(connect, self._secret, lambda: hello, Seconds.MEET)
        except Impostor:
            raise RankLostError(
                f"rank {rank} cannot be reached: another process answers on port {door.port} of {door.address}."
            ) from None
        except OSError as error:
            raise RankLostError(f"rank {rank} died: {where} ({error}).") from None
        if not answer["is_open"]:
            channel.close()
            raise RankLostError(f"rank {rank} no longer waits: it has lost another rank.")
        return channel.sock

    # ---- the door's thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            sources: list[Source] = [(self._introduced, READ, self._admit_early)]
            sources += [(fd, READ, partial(self._admit, fd)) for fd in self._listener.fds]
            serve(_SWEEP_SECONDS, sources)
            self._listener.tick()

    def _admit(self, fd: int) -> None:
        if (caller := self._listener.serve(fd)) is not None:
            self._answer(caller)

    def _admit_early(self) -> None:
        """Answers callers that arrived before this rank knew the secret."""
        os.eventfd_read(self._introduced)
        for caller in self._listener.introduce(self._secret):
            self._answer(caller)

    def _answer(self, caller: Caller) -> None:
        hello, at = caller.hello, (caller.hello["key"], caller.hello["from"])
        with self._changed:
            is_open = hello["to"] == self.rank and hello["key"] not in self._given_up
            caller.welcome(self._secret, {"is_open": is_open})
            if is_open and not hello["is_look"] and not caller.channel.closed:
                self._arrived[at] = caller.channel.sock
                self._changed.notify_all()
                return
        caller.channel.close()


def _configure(connection: socket.socket) -> None:
    """Lets the kernel end the connection when the other host is lost, because a lost host sends nothing."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if lost_after := config.get("LOST_AFTER_SECONDS"):
        keep_alive(connection, lost_after)
