"""The process of one model version, which parses and computes clients' requests.

The system limits its memory, and the server limits its time per request. A request that needs more ends this process,
and the server starts another. Each thread takes a request from the socket, answers it, and takes the next.
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

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.prediction.handlers import Handlers
from keras_ddl.serving.prediction.servable import Servable
from keras_ddl.serving.processes import frames, memory
from keras_ddl.serving.protocol import messages
from keras_ddl.serving.protocol.status import Code, RequestError
from keras_ddl.serving.settings import Options

_LARGE_BYTES = 8 * memory.MEGABYTE  # after larger requests and responses, memory is returned to the system
_SWITCH_SECONDS = 0.001
FILE = Path("assets.extra") / "tf_serving_warmup_requests"
MAX_REQUESTS = 1000
_METHODS = {
    "predict_log": "Predict",
    "classify_log": "Classify",
    "regress_log": "Regress",
    "multi_inference_log": "MultiInference",
}


def warm_up(handlers: Handlers, path: Path) -> int:
    """Replays the warm-up requests of the model in `path`. Returns their number.

    Raises: RequestError, ValueError: a request fails.
    """
    if not (path / FILE).exists():
        return 0
    count = 0
    for record in tf.data.TFRecordDataset(str(path / FILE)).as_numpy_iterator():
        if count == MAX_REQUESTS:
            raise ValueError(f"{path / FILE} has more than {MAX_REQUESTS} requests")
        log = messages.message("PredictionLog").FromString(record)
        kind = log.WhichOneof("log_type")
        if kind not in _METHODS:
            raise ValueError(f"a warm-up request of kind {kind}")
        handlers.respond(_METHODS[kind], getattr(log, kind).request, {})
        count += 1
    return count


def main(connection: socket.socket, path: Path, name: str, version: int, options: Options) -> None:
    """Loads the version, reports this, and answers requests until the server closes the connection. Never returns."""
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
    except BaseException as error:  # the server reports it
        frames.send(connection, 0, {"error": f"{type(error).__name__}: {error}"[:10_000]})
        os._exit(1)
    process = _Process(connection, handlers)
    begin = threading.Barrier(options.computing + 1)
    for _ in range(options.computing):
        threading.Thread(target=process.serve, args=(begin,), daemon=True).start()
    begin.wait()  # the memory limit does not count the threads' stacks
    memory.collect()
    gc.freeze()  # the garbage collector need not traverse the graph again
    memory.bound(options.memory_bytes)
    frames.send(connection, 0, {"warmed_up": replayed})
    process.ready.set()
    threading.Event().wait()


class _Process:
    """The threads that answer requests. They share the connection to the server: one at a time reads, one writes."""

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
                except MemoryError:  # in the middle of a frame, so the rest of the stream is unreadable
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
        request, body = frame.fields, b""
        reply: dict[str, Any] = {}
        try:
            body = self._handlers.answer(request["protocol"], request["method"], request["encoding"], frame.body, reply)
        except RequestError as error:
            reply = {**reply, "code": int(error.code), "error": error.message, "status": error.http_status}
        except MemoryError:
            reply = {
                "code": int(Code.RESOURCE_EXHAUSTED),
                "error": "The request or its response exceeds the memory limit (--max-memory-mb). Send fewer rows.",
                "status": 503,
            }
        except Exception as error:  # a bug of the server, not an error of the request
            reply = {"code": int(Code.INTERNAL), "error": f"{type(error).__name__}: {error}", "status": 500}
            print(f"keras-ddl serve: {request['method']}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        if "error" in reply:
            reply["error"] = reply["error"].encode(errors="replace").decode()[:10_000]
        try:
            with self._writing:
                frames.send(self._connection, frame.number, reply, body)
        except ConnectionError:
            os._exit(0)
        return len(body)
