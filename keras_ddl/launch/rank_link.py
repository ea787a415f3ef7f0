"""The launcher's end of the connection with one rank."""

from __future__ import annotations

import json
import time
from typing import Any

from keras_ddl.launch.outcome import RankOutcome
from keras_ddl.launch.output.screen import RankOutput
from keras_ddl.link.channel import Channel
from keras_ddl.link.kinds import Kind

_CHUNK_BYTES = 1 << 20


class RankLink:
    """Sends orders to one rank, and converts its frames to output, a result and an outcome."""

    def __init__(self, rank: int, output: RankOutput, call: bytes | None = None) -> None:
        """`call`: the pickled call that its program asks for."""
        self.outcome = RankOutcome(rank)
        self.output = output
        self.channel: Channel | None = None
        self.door: dict[str, Any] = {}  # the address where other hosts can reach its program (between_hosts.py)
        self.reached_at = ""  # the address of the launcher's host that its host uses
        self.over = False  # its program has ended, or the connection is lost
        self.started = False
        self.counted = False
        self.waits_for: set[int] = set()  # ranks that it waits for, see communicator/transports/host.py
        self._call = None if call is None else memoryview(call)
        self._sends_call = False
        self._reported_at = float("inf")
        self._chunks: list[bytes] = []
        self._ordered_to_stop = False

    @property
    def connected(self) -> bool:
        return self.channel is not None and not self.channel.closed

    @property
    def is_missing(self) -> bool:
        return self.channel is None

    @property
    def result(self) -> bytes | None:
        """The return value of the program of `keras_ddl.run`; None: it returned nothing."""
        return b"".join(self._chunks) if self._chunks else None

    def connect(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Takes the connection of the rank's wrapper. The program waits for `start`."""
        self.channel = channel
        self.outcome.host, self.outcome.pid = hello["host"], hello["pid"]

    def open_door(self, door: dict[str, Any]) -> bool:
        """Records where the rank's program can be reached. Returns whether its address is known."""
        try:
            assert self.channel is not None
            self.door = {**door, "address": self.channel.sock.getpeername()[0]}
            self.reached_at = self.channel.sock.getsockname()[0]
        except OSError:
            return False
        return True

    def send(self, kind: Kind, payload: bytes | dict[str, Any] = b"") -> None:
        """Sends a frame, if the rank is connected."""
        if self.channel is not None:
            self.channel.send(kind, payload)

    def write(self) -> None:
        """Sends queued frames."""
        assert self.channel is not None
        self.channel.write()
        # In chunks: the call may be large, and there may be many ranks.
        while self._sends_call and self.channel.backlog < _CHUNK_BYTES and not self.channel.closed:
            assert self._call is not None
            chunk, self._call = self._call[:_CHUNK_BYTES], self._call[_CHUNK_BYTES:]
            self.channel.send(Kind.CALL, bytes(chunk))
            self._sends_call = bool(chunk)

    def start(self) -> None:
        """Starts the program."""
        self.send(Kind.START)
        self.started = True

    def stop(self, signum: int, grace_seconds: float) -> None:
        """Tells the rank to end its program: `signum` now, SIGKILL after `grace_seconds`."""
        self._ordered_to_stop = True
        if not self.over:
            self.send(Kind.STOP, {"signal": int(signum), "grace_seconds": grace_seconds})

    def signal(self, signum: int) -> None:
        """Sends a signal to the rank's program."""
        if not self.over:
            self.send(Kind.SIGNAL, {"signal": int(signum)})

    def handle(self, kind: Kind, payload: bytes) -> None:
        """Handles one frame from the rank."""
        if kind is Kind.OUT:
            self.output.feed("out", payload)
        elif kind is Kind.ERR:
            self.output.feed("err", payload)
        elif kind is Kind.RESULT:
            self._chunks.append(payload)
        elif kind is Kind.CALL:
            self._sends_call = self._call is not None
            self.write()
        elif kind is Kind.REPORT and self.outcome.report is None:  # a child process may have reported first
            self.outcome.report, self._reported_at = json.loads(payload), time.monotonic()
        elif kind is Kind.CHECKPOINT:
            self.outcome.checkpoint = json.loads(payload)
        elif kind is Kind.WAITS:
            self.waits_for = set(json.loads(payload)["ranks"])
        elif kind is Kind.IN_JOB:
            self.outcome.in_job = json.loads(payload)["in_job"]
        elif kind is Kind.EXIT:
            self._end(json.loads(payload))

    def _end(self, message: dict[str, Any]) -> None:
        outcome = self.outcome
        outcome.status, outcome.stopped_by = message["status"], message["stopped_by"]
        times = [time.monotonic(), self._reported_at]
        if outcome.status != 0 and self.output.traceback_since is not None:
            times.append(self.output.traceback_since)
        outcome.failed_at = min(times)
        self._close_output()

    def lose(self) -> None:
        """Records that the connection has ended."""
        if not self.over:
            self.outcome.failed_at = time.monotonic()
            if self._ordered_to_stop:
                self.outcome.stopped_by = "the launcher"
            self._close_output()

    def _close_output(self) -> None:
        failed = not self.outcome.done
        self.outcome.traceback, self.outcome.stderr_tail = self.output.end(failed=failed, status=self.outcome.status)
        self.over = True

    def finish(self) -> None:
        """Closes the connection and the output, whether or not the rank has ended."""
        if not self.over:
            self.lose()
        if self.channel is not None:
            self.channel.close()
