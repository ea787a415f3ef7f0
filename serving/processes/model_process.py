"""Calls, times, ends and restarts the process of a model version, from the server's side."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_ddl.serving.processes import frames
from keras_ddl.serving.processes.forked import Forked, ForkServer
from keras_ddl.serving.protocol.status import Code, RequestError, timeout_message
from keras_ddl.serving.settings import Options

LOG = logging.getLogger("keras_ddl.serving")
_PIECE = 2**18  # asyncio copies each piece that is written
_LOAD_SECONDS = 600.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0  # between attempts to start a process


class LoadError(Exception):
    """A version cannot be loaded; the message says why."""


class LoadInterrupted(Exception):
    """The process that was loading a version ended without an error, as after a kill. Another may succeed."""


@dataclasses.dataclass(eq=False)
class Call:
    """A request to a process. `suspect`: it was running when the process died."""

    fields: Mapping[str, Any]
    body: bytes | bytearray
    answer: asyncio.Future
    suspect: bool = False
    timer: asyncio.TimerHandle | None = None


class ModelProcess:
    """One version's process, which is replaced when it dies, until `close`.

    If one request was running when the process died, that request is refused. If several were, each is retried alone,
    so that only the one that kills the process again is refused. On the event loop only.

    Attributes:
        error: why the process could not be restarted, while further attempts follow; "": it answers, or the first
            restart is in progress.
    """

    def __init__(self, fork_server: ForkServer, name: str, version: int, path: Path, options: Options) -> None:
        """`fork_server`: starts the process."""
        self.name, self.version, self.path, self.error = name, version, path, ""
        self.warmed_up = 0
        self._fork_server, self._options = fork_server, options
        self._waiting: deque[Call] = deque()
        self._running: dict[int, Call] = {}
        self._number = 0
        self._process: Forked | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()
        self._closed = False

    @property
    def busy(self) -> int:
        return len(self._running) + len(self._waiting)

    async def start(self) -> None:
        """Starts the process, and waits until the version is loaded.

        Raises: LoadError, LoadInterrupted, OSError; TimeoutError: loading takes more than ten minutes.
        """
        options = dataclasses.asdict(dataclasses.replace(self._options, access_log=None))
        arguments = {"path": str(self.path), "name": self.name, "version": self.version, "options": options}
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.to_thread(self._fork_server.fork, theirs, arguments)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_PIECE)
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                reply = (await self._frame(reader)).fields
        except (asyncio.IncompleteReadError, ConnectionError):
            reply = {}
            raise LoadInterrupted("The process that loaded it has ended.") from None
        except BaseException:
            reply = {}
            raise
        finally:
            if "warmed_up" not in reply or self._closed:
                writer.transport.abort()
                process.kill()
        if "error" in reply or self._closed:
            raise LoadError(reply.get("error", "The server has stopped."))
        self.warmed_up, self._process, self._writer, self._sending = reply["warmed_up"], process, writer, asyncio.Lock()
        self.error = ""
        self._spawn(self._read(reader, writer))
        self._pump()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self._answered(await self._frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._died(writer)

    async def _frame(self, reader: asyncio.StreamReader) -> frames.Frame:
        number, fields_size, body_size = frames.HEAD.unpack(await reader.readexactly(frames.HEAD.size))
        fields = json.loads(await reader.readexactly(fields_size))
        return frames.Frame(number, fields, await reader.readexactly(body_size) if body_size else b"")

    async def _send(self, writer: asyncio.StreamWriter, number: int, call: Call) -> None:
        """Sends a large body in pieces, because asyncio copies all bytes of one write."""
        body = memoryview(call.body)
        with contextlib.suppress(ConnectionError):  # `_read` handles it
            async with self._sending:
                writer.write(frames.head_of(number, call.fields, len(body)))
                for begin in range(0, len(body), _PIECE):
                    writer.write(body[begin : begin + _PIECE])
                    await writer.drain()

    async def call(self, fields: Mapping[str, Any], body: bytes | bytearray) -> frames.Frame:
        """Returns the reply.

        If the caller gives up, a waiting request is dropped, and a running one may run for --timeout.

        Raises: RequestError: UNAVAILABLE: the queue is full, or the process cannot be started now; or the error of the
            reply.
        """
        if self.busy >= self._options.computing + self._options.queue:
            raise RequestError(
                Code.UNAVAILABLE,
                f"The queue of model {self.name!r} is full: {self.busy} requests are running or waiting. Try again "
                "later.",
            )
        if self._closed:
            raise RequestError(Code.UNAVAILABLE, f"Version {self.version} of model {self.name!r} has ended.")
        if self.error:
            raise RequestError(Code.UNAVAILABLE, self._unavailable())
        call = Call(fields, body, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._pump()
        try:
            frame: frames.Frame = await call.answer
        finally:
            if call in self._waiting:  # the client has left
                self._waiting.remove(call)
        if "error" in frame.fields:
            reply = frame.fields
            raise RequestError(Code(reply["code"]), reply["error"], http_status=reply["status"])
        return frame

    def _unavailable(self) -> str:
        why = self.error.rstrip(".")
        return f"Version {self.version} of model {self.name!r} is not available yet. It could not be loaded: {why}."

    def _pump(self) -> None:
        while self._waiting and self._writer is not None and len(self._running) < self._options.computing:
            call = self._waiting[0]
            alone = call.suspect or any(each.suspect for each in self._running.values())
            if alone and self._running:
                return
            self._waiting.popleft()
            if call.answer.done():
                continue
            self._number += 1
            self._running[self._number] = call
            call.timer = asyncio.get_running_loop().call_later(
                self._options.timeout, self._too_slow, self._number, call
            )
            if len(call.body) <= _PIECE and not self._sending.locked():
                self._writer.write(frames.head_of(self._number, call.fields, len(call.body)) + call.body)
            else:
                self._spawn(self._send(self._writer, self._number, call))

    def _answered(self, frame: frames.Frame) -> None:
        call = self._running.pop(frame.number, None)
        if call is not None:
            self._finish(call, frame)
        self._pump()

    def _finish(self, call: Call, frame: frames.Frame) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if not call.answer.done():
            call.answer.set_result(frame)

    def _too_slow(self, number: int, call: Call) -> None:
        if self._running.pop(number, None) is None:
            return
        self._finish(call, _failed(Code.DEADLINE_EXCEEDED, timeout_message(self._options.timeout), 504))
        LOG.warning(
            "version %d of model %r: a request took longer than %g s (--timeout)",
            self.version,
            self.name,
            self._options.timeout,
        )
        for each in reversed(list(self._running.values())):  # reversed, because each goes to the front of the queue
            self._retry(each)
        self._running.clear()
        if self._process is not None:
            self._process.kill()
        self._died(self._writer)

    def _retry(self, call: Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if not call.answer.done():
            self._waiting.appendleft(call)

    def _died(self, writer: asyncio.StreamWriter | None) -> None:
        if writer is None or self._writer is not writer:
            return
        self._writer = None
        writer.transport.abort()
        LOG.warning("version %d of model %r: its process has ended; starting another", self.version, self.name)
        running = list(self._running.values())
        self._running.clear()
        for call in reversed(running):
            if len(running) == 1:
                text = "The process that computed the answer has died: the request exceeds the memory limit "
                text += "(--max-memory-mb), or the model cannot handle it. Send fewer rows."
                self._finish(call, _failed(Code.RESOURCE_EXHAUSTED, text, 503))
            else:
                call.suspect = True
                self._retry(call)
        if not self._closed:
            self._spawn(self._restart())

    async def _restart(self) -> None:
        """Retries to start the process until that succeeds. Meanwhile requests are refused."""
        begin, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while not self._closed:
            try:
                await self.start()
            except (LoadError, LoadInterrupted, OSError, TimeoutError) as error:
                before, self.error = self.error, f"{type(error).__name__}: {error}"
                if self.error != before:
                    LOG.error("version %d of model %r cannot be restarted: %s", self.version, self.name, self.error)
                while self._waiting:
                    self._finish(self._waiting.popleft(), _failed(Code.UNAVAILABLE, self._unavailable(), 503))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                seconds = time.monotonic() - begin
                LOG.info("version %d of model %r answers again after %.2f s", self.version, self.name, seconds)
                return

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> bool:
        """Ends the process, and abandons running requests. Returns whether no request was running."""
        done, self._closed = not self.busy, True
        writer, self._writer = self._writer, None
        if writer is not None and self._process is not None:
            writer.transport.abort()
            self._process.kill()
        for call in (*self._running.values(), *self._waiting):
            self._finish(call, _failed(Code.UNAVAILABLE, "The server has stopped, or the model was unloaded.", 503))
        self._running.clear()
        self._waiting.clear()
        return done


def _failed(code: Code, text: str, status: int) -> frames.Frame:
    return frames.Frame(0, {"code": int(code), "error": text, "status": status}, b"")
