"""Answers health probes on a separate port (--health-port) in a separate process.

The process shares no event loop, memory, open files or port with requests. It imports only Python's own modules. The
server regularly writes a byte to a pipe, which says whether it is ready. Without bytes the server counts as not
healthy. The health process ends with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

SILENT_SECONDS = 10.0  # a server that is silent for longer counts as hung
_MOST_CONNECTIONS = 64  # one more connection closes the oldest one
_ANSWER_SECONDS = 2.0  # time for a client to send its request and read the response
_MOST_BYTES = 8192  # per request


class HealthPort:
    """The server's end. The constructor opens the port and starts the process."""

    def __init__(self, host: str, port: int, silent_seconds: float = SILENT_SECONDS) -> None:
        """`port`: 0 chooses one. Raises: OSError: the port is in use."""
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_MOST_CONNECTIONS
            )
        except OSError as error:
            raise OSError(f"Health cannot listen on {host}:{port}: {error}. Give another --health-port.") from None
        self.port: int = self._listener.getsockname()[1]
        self._silent_seconds = silent_seconds
        self._writer = self._start()

    def _start(self) -> int:
        """Starts the process. Returns the write end of its pipe."""
        reader, writer = os.pipe()
        descriptors = (self._listener.fileno(), reader)
        try:
            os.set_blocking(writer, False)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *map(str, descriptors), str(self._silent_seconds)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        return writer

    def show(self, ready: bool) -> None:
        """Tells the process whether the server is ready, and restarts a dead process. Does not block.

        Call it several times a second.
        """
        with contextlib.suppress(OSError):  # the pipe is full, or no descriptors are left; the next call tries again
            if self._process.poll() is not None:
                before, self._writer = self._writer, self._start()
                os.close(before)
            os.write(self._writer, b"1" if ready else b"0")

    def close(self) -> None:
        os.close(self._writer)
        self._listener.close()
        self._process.wait()


class _Probes(asyncio.Protocol):
    """The process's end: answers probes from the last byte that arrived."""

    def __init__(self, silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        self._ready, self._heard_at = False, time.monotonic()
        self._connections: dict[asyncio.Task, None] = {}  # oldest first

    def data_received(self, data: bytes) -> None:
        self._ready, self._heard_at = data.endswith(b"1"), time.monotonic()

    def connection_lost(self, error: Exception | None) -> None:
        os._exit(0)  # the server has ended

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request, and closes the connection."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= _MOST_CONNECTIONS:
            next(iter(self._connections)).cancel()
        self._connections[task] = None
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer_to(head.split(b" ", 2)))
                await writer.drain()
        except (asyncio.CancelledError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # TimeoutError is an OSError
        finally:
            self._connections.pop(task, None)
            writer.close()

    def _answer_to(self, words: list[bytes]) -> bytes:
        alive = time.monotonic() - self._heard_at < self._silent_seconds
        answers = {
            b"/healthz": ("200 OK", "ok"),
            b"/readyz": ("200 OK", "ready") if self._ready else ("503 Service Unavailable", "not ready"),
        }
        status, text = "404 Not Found", "The paths are /healthz and /readyz."
        if words[0] in (b"GET", b"HEAD") and words[1] in answers:
            status, text = answers[words[1]]
            if not alive:
                status, text = "503 Service Unavailable", f"The server has been silent for {self._silent_seconds:g} s."
        body = f"{text}\n"
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        return f"{head}\r\n{'' if words[0] == b'HEAD' else body}".encode()


async def _serve(listener: int, pipe: int, silent_seconds: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server handles them, and ends this process
    probes = _Probes(silent_seconds)
    await asyncio.get_running_loop().connect_read_pipe(lambda: probes, os.fdopen(pipe, "rb", 0))
    server = await asyncio.start_server(probes.answer, sock=socket.socket(fileno=listener), limit=_MOST_BYTES)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
