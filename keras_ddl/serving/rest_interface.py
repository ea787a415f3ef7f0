"""The REST interface of TensorFlow Serving, its metrics path, and health for load balancers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from aiohttp import http_exceptions, web
from google.protobuf import json_format
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_pb2

from keras_ddl.serving import bodies, json_values, tensors
from keras_ddl.serving.handlers import Handlers
from keras_ddl.serving.json_processes import JsonProcesses
from keras_ddl.serving.limits import Held, Memory
from keras_ddl.serving.metrics import Metrics
from keras_ddl.serving.servable import Servable
from keras_ddl.serving.status import Code, RequestError, invalid
from keras_ddl.serving.workers import Record, model_of

_MODEL = re.compile(
    r"/v1/models/(?P<name>[^/:]+)(/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
    r"(:(?P<method>\w+)|/(?P<metadata>metadata))?"
)
METRICS_PATH = "/monitoring/prometheus/metrics"
_ALIVE, _READY = "/healthz", "/readyz"
_CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "Origin, Content-Type, Accept, Authorization",
}
_JSON_BYTES = 20  # of a number in an answer, about
_LARGE_BYTES = 2**18  # of an answer that is sent in pieces
_MOST_DIGITS = 19  # of a version

Answer = Callable[[web.Request, Record, Held, Any], Awaitable[bytes | bytearray]]


class RestInterface:
    """The HTTP server on the running event loop."""

    def __init__(
        self,
        handlers: Handlers,
        metrics: Metrics,
        memory: Memory,
        processes: JsonProcesses,
        *,
        message_bytes: int,
        timeout: float,
        drain_seconds: float,
        idle_seconds: float = 75.0,
        cors: bool = False,
        metrics_path: str | None = METRICS_PATH,
    ) -> None:
        """
        Args:
            memory: what all requests under way may hold.
            processes: read and write what is large.
            message_bytes: of a request's body, also after it is unpacked; a larger one is refused with 413.
            timeout: seconds in which a body must have come and be answered, else 504.
            drain_seconds: how long `stop` waits for requests under way.
            idle_seconds: how long a connection may wait for a request, and a request's headers may take.
            cors: whether pages of other origins may ask.
            metrics_path: None: no metrics.
        """
        self._handlers, self._metrics, self._timeout = handlers, metrics, timeout
        self._memory, self._processes, self._message_bytes = memory, processes, message_bytes
        self._headers = _CORS if cors else {}
        app = web.Application()
        if metrics_path is not None:
            app.router.add_get(metrics_path, self._get_metrics)
        app.router.add_get(_ALIVE, self._alive)
        app.router.add_get(_READY, self._ready)
        if cors:
            app.router.add_route("OPTIONS", "/{rest:.*}", self._preflight)
        app.router.add_route("*", "/{rest:.*}", self._model)
        self._methods: dict[str, Answer] = {
            "predict": self._predict,
            "classify": self._classify,
            "regress": self._regress,
        }
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=idle_seconds,
            shutdown_timeout=drain_seconds,
            logger=_without_tracebacks(),
            auto_decompress=False,  # aiohttp would go on with what is refused
        )
        self._is_ready = False

    async def start(self, host: str, port: int, context: ssl.SSLContext | None = None) -> int:
        """Returns the port; 0 chooses one. Raises: OSError: it is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_port=False, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            raise OSError(
                f"REST cannot listen on {host}:{port}: {error}. Give another --rest-port; 0 chooses one."
            ) from None
        return self._runner.addresses[0][1]

    def show_health(self, serving: bool) -> None:
        self._is_ready = serving

    async def stop(self) -> None:
        """Takes no new connections, and waits for the requests under way."""
        await self._runner.cleanup()

    # ---- what is asked -------------------------------------------------------------------------------------------

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._is_ready and self._handlers.models.all_available()
        return web.Response(text="ready\n" if ready else "not ready\n", status=200 if ready else 503)

    async def _preflight(self, request: web.Request) -> web.Response:
        return web.Response(status=200, headers=self._headers)

    async def _model(self, request: web.Request) -> web.Response:
        found = _MODEL.fullmatch(request.path)
        record = Record("rest", "")
        answer: Answer | None = None
        if found is not None:
            kind = found["method"] or found["metadata"] or "status"
            record.method, record.model = kind.capitalize(), found["name"]
            if found["method"] is None:
                answer = {"GET": self._metadata if found["metadata"] else self._status}.get(request.method)
            elif request.method == "POST":
                answer = self._methods.get(kind)
        return await self._respond(request, record, found, answer)

    async def _respond(self, request: web.Request, record: Record, found: Any, answer: Answer | None) -> Any:
        status: int = 500
        body: bytes | bytearray = b""
        try:
            if answer is None:
                code = Code.INVALID_ARGUMENT if request.path.startswith("/v1/") else Code.NOT_FOUND
                raise RequestError(code, f"Malformed request: {request.method} {request.path[:200]}")
            async with asyncio.timeout(self._timeout):
                with self._memory.held() as held:
                    body, status = await answer(request, record, held, found), 200
        except RequestError as error:
            record.code, record.error, status = error.code, error.message, error.http_status
        except (http_exceptions.HttpProcessingError, web.RequestPayloadError) as error:
            record.code, record.error, status = Code.INVALID_ARGUMENT, f"The request is malformed: {error}", 400
        except TimeoutError:
            record.code, status = Code.DEADLINE_EXCEEDED, 504
            record.error = f"The request was not answered within {self._timeout:g} s."
        except ConnectionError:  # the client has left in the middle of its request
            record.code = Code.CANCELLED
            raise
        except Exception as error:  # a defect of the server must not take it down
            record.code, record.error = Code.INTERNAL, f"{type(error).__name__}: {error}"
            self._metrics.log_exception(record, error)
        except BaseException:  # the client has left
            record.code = Code.CANCELLED
            raise
        finally:
            self._metrics.record_request(record, request.remote or "")
        if record.code != Code.OK:
            body = json_values.dumps({"error": record.error.encode(errors="replace").decode()})
        if len(body) > _LARGE_BYTES:
            return await _in_pieces(request, body, self._headers)
        return web.Response(body=bytes(body), status=status, content_type="application/json", headers=self._headers)

    async def _body(self, request: web.Request, held: Held) -> bytearray:
        """Returns the body, uncompressed. Raises: RequestError: RESOURCE_EXHAUSTED: it is larger than the limit."""
        if (request.content_length or 0) > self._message_bytes:
            raise bodies.too_large(self._message_bytes)
        body = bytearray()
        while chunk := await request.content.readany():
            held.add(len(chunk))
            body += chunk
            if len(body) > self._message_bytes:
                raise bodies.too_large(self._message_bytes)
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding == "identity":
            return body
        inflated = await asyncio.to_thread(bodies.inflated, body, encoding, self._message_bytes)
        held.add(len(inflated))
        return inflated

    async def _predict(self, request: web.Request, record: Record, held: Held, found: Any) -> bytes:
        with model_of(self._handlers.models, record, _spec(found)) as servable:
            body = await self._body(request, held)
            given: json_values.Predict = await self._processes.call(
                "predict_request", body, servable.dtypes, self._message_bytes, size=len(body), held=held
            )
            signature = servable.signature(given.signature)
            record.signature = signature.name
            tensors.check(signature, {alias: signature.dtypes[alias] for alias in given.inputs})
            feeds = tensors.with_defaults(signature, given.inputs)
            fetches = list(signature.outputs)
            outputs = await self._handlers.workers.run(servable, signature, feeds, fetches)
            size = _JSON_BYTES * sum(array.size for array in outputs)
            return await self._processes.call("predict_response", fetches, outputs, given.in_rows, size=size, held=held)

    async def _classify(self, request: web.Request, record: Record, held: Held, found: Any) -> bytes:
        with model_of(self._handlers.models, record, _spec(found)) as servable:
            signature, rows = await self._rows(request, servable, record, held)
            result = await self._handlers.classify_rows(servable, signature, rows)
            answers = [[[one.label, one.score] for one in each.classes] for each in result.classifications]
            return json.dumps({"results": answers}).encode()

    async def _regress(self, request: web.Request, record: Record, held: Held, found: Any) -> bytes:
        with model_of(self._handlers.models, record, _spec(found)) as servable:
            signature, rows = await self._rows(request, servable, record, held)
            result = await self._handlers.regress_rows(servable, signature, rows)
            return json.dumps({"results": [each.value for each in result.regressions]}).encode()

    async def _rows(
        self, request: web.Request, servable: Servable, record: Record, held: Held
    ) -> tuple[Any, np.ndarray]:
        body = await self._body(request, held)
        name, rows = await self._processes.call(
            "examples_request", body, servable.dtypes, self._message_bytes, size=len(body), held=held
        )
        record.signature = name
        found = np.empty(len(rows), dtype=object)
        found[:] = rows
        return servable.signature(name), found

    async def _status(self, request: web.Request, record: Record, held: Held, found: Any) -> bytes:
        message = get_model_status_pb2.GetModelStatusRequest(model_spec=_spec(found))
        return json.dumps(_as_json(self._handlers.status(message, record)), indent=1).encode()

    async def _metadata(self, request: web.Request, record: Record, held: Held, found: Any) -> bytes:
        message = get_model_metadata_pb2.GetModelMetadataRequest(
            model_spec=_spec(found), metadata_field=["signature_def"]
        )
        answer = _as_json(self._handlers.metadata(message, record))
        for each in answer["metadata"].values():
            del each["@type"]  # which TensorFlow Serving leaves out
        return json.dumps(answer, indent=1).encode()


async def _in_pieces(request: web.Request, body: bytes | bytearray, headers: Mapping[str, str]) -> Any:
    """Sends an answer; what is handed over at once is copied at once, and holds up others for as long."""
    response = web.StreamResponse(headers={**headers, "Content-Type": "application/json"})
    response.content_length = len(body)
    await response.prepare(request)
    for begin in range(0, len(body), _LARGE_BYTES):
        await response.write(memoryview(body)[begin : begin + _LARGE_BYTES])
    await response.write_eof()
    return response


def _spec(found: Any) -> Any:
    spec = model_pb2.ModelSpec(name=found["name"])
    if found["version"] is not None:
        if len(found["version"]) > _MOST_DIGITS or int(found["version"]) >= 2**63:
            raise invalid(f"There is no version {found['version'][:30]}.")
        spec.version.value = int(found["version"])
    elif found["label"] is not None:
        spec.version_label = found["label"]
    return spec


def _as_json(message: Any) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _without_tracebacks() -> logging.Logger:
    """Returns a logger for what clients break in HTTP itself: one line for each, since none is the server's fault."""
    logger = logging.getLogger("keras_ddl.serving.http")

    def in_one_line(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            record.msg = f"{record.getMessage()}: {str(record.exc_info[1])[:200]!r}"
            record.args, record.exc_info, record.exc_text = (), None, None
        return True

    if not logger.filters:
        logger.addFilter(in_one_line)
    return logger
