"""Connects ranks that `keras-ddl run` started without MPI.

Ranks of one host use sockets in the job's directory, which only the job's user may enter (ddl_host.h). For ranks of
other hosts see between_hosts.py.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import os
import pickle
import threading
import time
from collections.abc import Sequence
from ctypes import byref
from typing import Any

from keras_ddl import config, errors
from keras_ddl.communicator.native.native_library import DEADLINE_EXCEEDED, ERROR_BYTES, Transport, core
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.communicator.transports.between_hosts import Doorkeeper
from keras_ddl.communicator.transports.host_messages import HostMessages
from keras_ddl.communicator.transports.membership import Membership
from keras_ddl.link import program
from keras_ddl.link.kinds import Kind
from keras_ddl.topology.launcher import Launcher

_SLICE_MS = 100
_TOGETHER = "Every rank must call keras_ddl.init() (Strategy() does it), and split() together."


class HostTransport(Transport):
    """The connection of ranks without MPI, made by `_connect`."""

    directory: str
    key: str
    world_ranks: tuple[int, ...]

    def __init__(self) -> None:
        super().__init__()
        self._splits: collections.Counter[tuple[tuple[int, ...], int]] = collections.Counter()
        self._lock = threading.Lock()

    def split(self, ranks: Sequence[int], tag: int) -> HostTransport:
        """See Transport.split. The survivors of a communicator can be split after other ranks have died."""
        with self._lock:
            self._splits[tuple(ranks), tag] += 1
            number = self._splits[tuple(ranks), tag]
        # The key is the same on all of these ranks, because they have made this call equally often.
        text = f"{self.key} {list(ranks)} {tag} {number}".encode()
        key = hashlib.blake2b(text, digest_size=8).hexdigest()
        return _connect(self.directory, key, ranks.index(self.rank), tuple(self.world_ranks[r] for r in ranks))

    def gather(self, mine: bytes) -> list[bytes]:
        """Returns the bytes of all ranks, which must be of equal length. COLLECTIVE. Handles signals while it waits.

        Raises:
            RankLostError: a rank has ended or died. DeadlineError: a rank has not called this in time.
        """
        size, length = self.size, len(mine)
        out = ctypes.create_string_buffer(max(1, size * length))
        arrived = (ctypes.c_uint8 * size)()
        patience = _Patience(self.world_ranks[self.rank])
        while code := core().ddl_host_all_gather(byref(self), mine, out, length, _SLICE_MS, arrived):
            if code != DEADLINE_EXCEEDED:
                raise self.error(code)
            patience.check([rank for rank, has_arrived in zip(self.world_ranks, arrived) if not has_arrived])
        return [out.raw[r * length : (r + 1) * length] for r in range(size)]

    def allgather(self, value: Any) -> list[Any]:
        """Returns the objects of all ranks, pickled. COLLECTIVE."""
        data = pickle.dumps(value)
        lengths = [int.from_bytes(each, "little") for each in self.gather(len(data).to_bytes(8, "little"))]
        return [pickle.loads(each) for each in self.gather(data.ljust(max(lengths)))]

    def for_messages(self) -> HostMessages:
        return HostMessages(self)


class _Patience:
    """Warns, and finally raises, when ranks take too long to meet (KERAS_DDL_DEADLINE_SECONDS)."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._launcher_knows = False  # whom this rank waits for
        self._begun = time.monotonic()
        self._warn_after, self._deadline = config.get("WARN_AFTER_SECONDS"), config.get("DEADLINE_SECONDS")

    def check(self, missing: list[int]) -> None:
        """Raises: RankLostError: one of the `missing` has ended. DeadlineError: the time is over."""
        if (link := program.current()) is not None:
            if not self._launcher_knows:
                self._launcher_knows = True
                program.tell(Kind.WAITS, {"ranks": missing})
            link.look()
            for rank in link.ended.intersection(missing):
                error = errors.RankLostError(
                    f"rank {rank} has left: its program ended before all ranks had connected. {_TOGETHER}"
                )
                error.has_left = True
                raise error
        waited = time.monotonic() - self._begun
        text = f"rank {self._rank} has waited {waited:.0f} s for rank(s) {missing}"
        if self._deadline and waited > self._deadline:
            raise errors.DeadlineError(f"{text} (KERAS_DDL_DEADLINE_SECONDS). {_TOGETHER}")
        if self._warn_after and waited > self._warn_after:
            self._warn_after = 2 * waited
            stack_position.warn(f"keras_ddl: {text}. {_TOGETHER}", RuntimeWarning)


_worlds: collections.Counter[int] = collections.Counter()  # epoch -> number of transports made in it
_doorkeeper: Doorkeeper | None = None


def doorkeeper(launcher: Launcher) -> Doorkeeper | None:
    """Returns the door of this rank, which the first call opens; None: all ranks are on one host."""
    global _doorkeeper
    if launcher.num_hosts > 1 and _doorkeeper is None:
        _doorkeeper = Doorkeeper(launcher.rank, launcher.size or 1)
    return _doorkeeper


def start(launcher: Launcher, membership: Membership) -> HostTransport:
    """Returns the transport of the ranks of a `membership`. COLLECTIVE over them.

    Raises: as `HostTransport.gather`. CollectiveError: this rank's socket could not be opened.
    """
    assert launcher.directory is not None  # every job without MPI has one
    ranks, epoch = membership.members, membership.epoch
    _worlds[epoch] += 1
    return _connect(launcher.directory, f"world-{epoch}.{_worlds[epoch]}", ranks.index(launcher.rank), ranks)


def abort(status: int) -> None:
    """Ends this rank; the launcher then ends the others."""
    os._exit(status)


def _connect(directory: str, key: str, rank: int, world_ranks: tuple[int, ...]) -> HostTransport:
    """Returns the transport of `world_ranks`, once all of them have called this with the same key."""
    transport, message = HostTransport(), ctypes.create_string_buffer(ERROR_BYTES)
    transport.directory, transport.key, transport.world_ranks = directory, key, world_ranks
    code = core().ddl_host_open(
        os.fsencode(directory), key.encode(), rank, len(world_ranks), byref(transport), message, ERROR_BYTES
    )
    if code:
        raise errors.CollectiveError(message.value.decode(errors="replace"))
    try:
        if _doorkeeper is not None:
            patience = _Patience(world_ranks[rank])
            connections = _doorkeeper.connect(key, world_ranks, patience.check)
            while connections:
                other, connection = connections.popitem()
                code = core().ddl_host_connect(byref(transport), world_ranks.index(other), connection.detach())
                if code:
                    for each in connections.values():
                        each.close()
                    raise transport.error(code)
        transport.gather(b"")
    except BaseException:
        transport.destroy()
        raise
    return transport
