"""The processes that read and write large JSON (json_process.py), as the server uses them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import sys
from typing import Any

from keras_ddl.serving.json_process import FUNCTIONS, HEADER, packed, sizes_of
from keras_ddl.serving.limits import Held
from keras_ddl.serving.status import Code, RequestError

LOG = logging.getLogger("keras_ddl.serving")
SMALL_BYTES = 100_000  # which this process reads itself: it takes about a millisecond
_BYTES_PER_BYTE = 24  # of memory, that reading a body may take: a list of short strings takes as much
_BASE_BYTES = 64 * 2**20
_PIECE = 2**18
_KEPT_BYTES = 2**23  # a process that has had a larger call ends: then its memory is free again


class JsonProcesses:
    """Up to `count` processes, started when there is something for them. On the event loop only."""

    def __init__(self, count: int, message_bytes: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._idle: list[asyncio.subprocess.Process] = []
        self._limit = _BASE_BYTES + _BYTES_PER_BYTE * message_bytes

    async def call(self, name: str, *arguments: Any, size: int, held: Held) -> Any:
        """Calls one of `json_process.FUNCTIONS`: a large call in a process, a small one here.

        Args:
            size: about how many bytes of JSON are read or written.
            held: counts the answer.
        Raises: RequestError: what the function raises; RESOURCE_EXHAUSTED: the process did not survive.
        """
        if size <= SMALL_BYTES:
            return FUNCTIONS[name](*arguments)
        given = [pickle.PickleBuffer(each) if isinstance(each, bytearray) else each for each in arguments]
        async with self._free:
            process = self._idle.pop() if self._idle else await self._start()
            done = False
            try:
                is_answer, value, received = await self._ask(process, (name, given), held)
                done = size + received <= _KEPT_BYTES
            except (ConnectionError, asyncio.IncompleteReadError):
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED,
                    "The request or its answer takes too much memory as JSON. Send fewer rows.",
                    http_status=413,
                ) from None
            finally:  # also when the client has left, or time is up: the answer would be the next one's
                if done:
                    self._idle.append(process)
                else:
                    _kill(process)
        if is_answer:
            return value
        raise RequestError(Code(value[0]), value[1], http_status=value[2])

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the folder that the server was started in may hold anything
            "-m",
            "keras_ddl.serving.json_process",
            str(self._limit),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
            start_new_session=True,  # Ctrl-C is for the server, which then finishes what is under way
        )

    async def _ask(self, process: asyncio.subprocess.Process, call: Any, held: Held) -> tuple[bool, Any, int]:
        assert process.stdin is not None and process.stdout is not None
        for each in packed(call):
            for begin in range(0, len(each), _PIECE):  # what is written at once is copied at once
                process.stdin.write(memoryview(each)[begin : begin + _PIECE])
                await process.stdin.drain()
        size, count = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
        sizes = sizes_of(await process.stdout.readexactly(8 * count))
        received = size + sum(sizes)
        held.add(received)
        data = await process.stdout.readexactly(size)
        buffers = [await _read(process.stdout, each) for each in sizes]
        return (*pickle.loads(data, buffers=buffers), received)

    async def close(self) -> None:
        """Ends the processes."""
        for process in self._idle:
            _kill(process)
            await process.wait()
        self._idle.clear()


async def _read(stream: asyncio.StreamReader, size: int) -> bytearray:
    """As stream.readexactly, piece by piece: copying much would hold up the event loop."""
    found, position = bytearray(size), 0
    while position < size:
        piece = await stream.read(min(_PIECE, size - position))
        if not piece:
            raise asyncio.IncompleteReadError(b"", size)
        found[position : position + len(piece)] = piece
        position += len(piece)
    return found


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
