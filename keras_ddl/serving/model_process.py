"""A process that holds one model version, and parses and computes what strangers ask of it.

The system bounds what it may allocate, and the server how long it may compute: a request that needs more ends this
process, and the server starts another. Each thread takes a request from the socket, answers it, and takes the next.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from keras_ddl.serving import frames, memory
from keras_ddl.serving.handlers import Handlers
from keras_ddl.serving.servable import Servable
from keras_ddl.serving.settings import Options
from keras_ddl.serving.status import Code, RequestError
from keras_ddl.serving.warm_up import warm_up

_LARGE_BYTES = 8 * memory.MEGABYTE  # of a request or an answer, after which memory goes back to the system
_SWITCH_SECONDS = 0.001


def main(connection: socket.socket, path: Path, name: str, version: int, options: Options) -> None:
    """Loads the version, says so, and answers requests until the server closes the connection. Does not return."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        servable = Servable(
            path,
            name,
            version,
            intra_op_threads=options.intra_op_threads or options.threads,
            inter_op_threads=options.inter_op_threads or options.threads,
            gpu_memory_fraction=options.gpu_memory_fraction,
            tags=options.tags,
        )
        handlers = Handlers(servable, options)
        rounds = options.warm_up_rounds if options.warm_up else 0
        replayed = sum(warm_up(handlers, path) for _ in range(rounds))
    except BaseException as error:  # whatever is wrong with a model, the server says it
        frames.send(connection, 0, {"error": f"{type(error).__name__}: {error}"[:10_000]})
        os._exit(1)
    process = _Process(connection, handlers)
    begin = threading.Barrier(options.computing + 1)
    for _ in range(options.computing):
        threading.Thread(target=process.serve, args=(begin,), daemon=True).start()
    begin.wait()  # their stacks belong to what it has before the first request
    memory.collect()
    gc.freeze()  # the graph stays: to look through it again and again would hold up requests
    memory.bound(options.memory_bytes)
    frames.send(connection, 0, {"warmed_up": replayed})
    process.ready.set()
    threading.Event().wait()


class _Process:
    def __init__(self, connection: socket.socket, handlers: Handlers) -> None:
        self._connection, self._stream, self._handlers = connection, connection.makefile("rb"), handlers
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self.ready = threading.Event()

    def serve(self, begin: threading.Barrier) -> None:
        begin.wait()
        self.ready.wait()
        while True:
            with self._reading:
                try:
                    frame = frames.receive(self._stream)
                except MemoryError:  # in the middle of a frame: what follows cannot be read any more
                    frame = None
                except ConnectionError:
                    frame = None
            if frame is None:
                os._exit(0)
            size = len(frame.body) + self._answer(frame)
            frame = None
            if size > _LARGE_BYTES:
                memory.collect()

    def _answer(self, frame: frames.Frame) -> int:
        asked, body = frame.fields, b""
        said: dict[str, Any] = {}
        try:
            body = self._handlers.answer(asked["protocol"], asked["method"], asked["encoding"], frame.body, said)
        except RequestError as error:
            said = {**said, "code": int(error.code), "error": error.message, "status": error.http_status}
        except MemoryError:
            said = {
                "code": int(Code.RESOURCE_EXHAUSTED),
                "error": "The request or its answer takes more memory than it may (--max-memory-mb). Send fewer rows.",
                "status": 503,
            }
        except Exception as error:  # a defect, which must not look like one of the request
            said = {"code": int(Code.INTERNAL), "error": f"{type(error).__name__}: {error}", "status": 500}
            print(f"keras-ddl serve: {asked['method']}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        if "error" in said:
            said["error"] = said["error"].encode(errors="replace").decode()[:10_000]
        try:
            with self._writing:
                frames.send(self._connection, frame.number, said, body)
        except ConnectionError:
            os._exit(0)
        return len(body)
