"""Ranks of one host that the launcher started by itself: they meet without MPI, by sockets in the job's directory.

The directory belongs to the job's user alone, so nobody else can send there (ddl_host.h). MPI is not loaded.
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
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Any

from keras_ddl import config, errors
from keras_ddl.communicator import stack_position
from keras_ddl.communicator.host_messages import HostMessages
from keras_ddl.communicator.native_library import ERROR_BYTES, Transport, core

_DEADLINE_EXCEEDED = 4  # of ddl_code
_SLICE_MS = 100


class HostTransport(Transport):
    """A way to ranks of this host. Made by `_open`."""

    directory: str
    key: str
    world_ranks: tuple[int, ...]

    def __init__(self) -> None:
        super().__init__()
        self._splits: collections.Counter[tuple[tuple[int, ...], int]] = collections.Counter()
        self._lock = threading.Lock()

    def split(self, ranks: Sequence[int], tag: int) -> HostTransport:
        """As Transport.split. What is left of a communicator can be split after ranks have died."""
        with self._lock:
            self._splits[tuple(ranks), tag] += 1
            number = self._splits[tuple(ranks), tag]
        # Equal on these ranks, who have called it equally often.
        text = f"{self.key} {list(ranks)} {tag} {number}".encode()
        key = hashlib.blake2b(text, digest_size=8).hexdigest()
        made = _open(self.directory, key, ranks.index(self.rank), tuple(self.world_ranks[r] for r in ranks))
        try:
            made.gather(b"")
        except BaseException:
            made.destroy()
            raise
        return made

    def gather(self, mine: bytes) -> list[bytes]:
        """Returns the bytes of all ranks, equally many of each. COLLECTIVE. Signals are handled meanwhile.

        Raises:
            RankLostError: one has ended or died. DeadlineError: one has not come.
        """
        size, length = self.size, len(mine)
        out = ctypes.create_string_buffer(max(1, size * length))
        arrived = (ctypes.c_uint8 * size)()
        begun = time.monotonic()
        warn_after, deadline = config.get("WARN_AFTER_SECONDS"), config.get("DEADLINE_SECONDS")
        while code := core().ddl_host_all_gather(byref(self), mine, out, length, _SLICE_MS, arrived):
            if code != _DEADLINE_EXCEEDED:
                raise errors.from_code(code, self.last_error())
            missing = [rank for rank, has_come in zip(self.world_ranks, arrived) if not has_come]
            for rank in missing:
                if Path(self.directory, config.ENDED_FILE.format(rank=rank)).exists():
                    error = errors.RankLostError(
                        f"rank {rank} has left: its program ended before all ranks had met. Every rank must call "
                        "keras_ddl.init() (Strategy() does it), and split() together."
                    )
                    error.has_left = True
                    raise error
            waited = time.monotonic() - begun
            text = f"rank {self.world_ranks[self.rank]} has waited {waited:.0f} s for rank(s) {missing} to meet"
            if deadline and waited > deadline:
                raise errors.DeadlineError(f"{text} (KERAS_DDL_DEADLINE_SECONDS).")
            if warn_after and waited > warn_after:
                warn_after = 2 * waited
                stack_position.warn(f"keras_ddl: {text}.", RuntimeWarning)
        return [out.raw[r * length : (r + 1) * length] for r in range(size)]

    def allgather(self, value: Any) -> list[Any]:
        """Returns the objects of all ranks, pickled. COLLECTIVE."""
        data = pickle.dumps(value)
        lengths = [int.from_bytes(each, "little") for each in self.gather(len(data).to_bytes(8, "little"))]
        return [pickle.loads(each) for each in self.gather(data.ljust(max(lengths)))]

    def last_error(self) -> str:
        """Returns the text of the last error."""
        text: bytes = ctypes.CFUNCTYPE(ctypes.c_char_p, c_void_p)(self.functions[7])(self.self)
        return text.decode(errors="replace")

    def destroy(self) -> None:
        """Frees it, where no communicator has taken it over."""
        ctypes.CFUNCTYPE(None, c_void_p)(self.functions[9])(self.self)

    def for_messages(self) -> HostMessages:
        """As Transport.for_messages."""
        return HostMessages(self)


_worlds = 0


def start(launcher: config.Launcher) -> HostTransport:
    """Returns a way to all ranks that `launcher` started. COLLECTIVE.

    Raises: what `HostTransport.gather` raises. CollectiveError: this rank's socket could not be opened.
    """
    global _worlds
    _worlds += 1
    assert launcher.directory is not None and launcher.size is not None  # of a launcher that starts without MPI
    world = _open(launcher.directory, f"world-{_worlds}", launcher.rank, tuple(range(launcher.size)))
    try:
        world.gather(b"")
    except BaseException:
        world.destroy()
        raise
    return world


def abort(status: int) -> None:
    """Ends this rank; the launcher then ends the others."""
    os._exit(status)


def _open(directory: str, key: str, rank: int, world_ranks: tuple[int, ...]) -> HostTransport:
    transport, message = HostTransport(), ctypes.create_string_buffer(ERROR_BYTES)
    transport.directory, transport.key, transport.world_ranks = directory, key, world_ranks
    code = core().ddl_host_open(
        os.fsencode(directory), key.encode(), rank, len(world_ranks), byref(transport), message, ERROR_BYTES
    )
    if code:
        raise errors.CollectiveError(message.value.decode(errors="replace"))
    return transport
