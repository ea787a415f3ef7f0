"""The REST interface of TensorFlow Serving, its metrics path, and health for load balancers.

Bodies are forwarded to the model processes and back unchanged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

from aiohttp import http_exceptions, web

from keras_ddl.serving.interfaces.connections import Connections
from keras_ddl.serving.interfaces.flights import Flight, Flights
from keras_ddl.serving.interfaces.front import Front
from keras_ddl.serving.metrics import Record
from keras_ddl.serving.protocol import messages
from keras_ddl.serving.protocol.status import Code, RequestError, invalid, too_large
from keras_ddl.serving.settings import Options

_MODEL = re.compile(
    r"/v1/models/(?P<name>[^/:]+)(/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
    r"(:(?P<method>\w+)|/(?P<metadata>metadata))?"
)
_ALIVE, _READY = "/healthz", "/readyz"
_CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "Origin, Content-Type, Accept, Authorization",
}
_SMALL_BYTES, _PIECE = 2**16, 2**18  # larger responses than _SMALL_BYTES are sent in pieces
_MOST_DIGITS = 19  # in a version
# (HTTP method, method in the path) -> gRPC's method.
_METHODS = {
    ("POST", "predict"): "Predict",
    ("POST", "classify"): "Classify",
    ("POST", "regress"): "Regress",
    ("GET", "metadata"): "Metadata",
    ("GET", "status"): "Status",
}


class RestInterface:
    """The HTTP server on the running event loop."""

    def __init__(self, front: Front, flights: Flights, options: Options, connections: int) -> None:
        """`connections`: limit on open connections; beyond it the one idle for longest is closed."""
        self._front, self._flights, self._options = front, flights, options
        self._connections = connections
        self._headers = _CORS if options.cors else {}
        app = web.Application()
        if options.metrics_path is not None:
            app.router.add_get(options.metrics_path, self._get_metrics)
        app.router.add_get(_ALIVE, self._alive)
        app.router.add_get(_READY, self._ready)
        if options.cors:
            app.router.add_route("OPTIONS", "/{rest:.*}", self._preflight)
        app.router.add_route("*", "/{rest:.*}", self._model)
        logger = logging.getLogger("keras_ddl.serving.http")
        logger.setLevel(logging.CRITICAL)  # clients' invalid HTTP must not fill the log
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,  # a request whose client has left is removed from the queue
            keepalive_timeout=options.idle_seconds,
            shutdown_timeout=options.drain_seconds,
            logger=logger,
            auto_decompress=False,  # the model processes decompress
        )
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port (0 chooses one). Raises: OSError: the port is in use."""
        await self._runner.setup()
        assert self._runner.server is not None
        protocols = Connections(self._runner.server, self._connections)
        try:
            self._listening = await asyncio.get_running_loop().create_server(protocols, host, port, reuse_port=False)
        except OSError as error:
            raise OSError(
                f"REST cannot listen on {host}:{port}: {error}. Give another --rest-port; 0 chooses one."
            ) from None
        return self._listening.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Accepts no new connections, and waits for running requests."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    # ---- requests ------------------------------------------------------------------------------------------------

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._front.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._front.ready
        return web.Response(text="ready\n" if ready else "not ready\n", status=200 if ready else 503)

    async def _preflight(self, request: web.Request) -> web.Response:
        return web.Response(status=200, headers=self._headers)

    async def _model(self, request: web.Request) -> web.StreamResponse:
        """Answers a request about a model: status, metadata or a prediction."""
        match = _MODEL.fullmatch(request.path)
        method = None
        if match is not None:
            method = _METHODS.get((request.method, match["method"] or match["metadata"] or "status"))
        record, body, status, flight = Record("rest", method or ""), b"", 200, None

        def drop() -> None:
            if request.transport is not None:
                request.transport.abort()

        try:
            with self._front.answering(record, request.remote or ""):
                flight = self._flights.begin(drop)
                if method is None or match is None:
                    code = Code.INVALID_ARGUMENT if request.path.startswith("/v1/") else Code.NOT_FOUND
                    raise RequestError(code, f"Malformed request: {request.method} {request.path[:200]}")
                record.model = match["name"]
                async with asyncio.timeout_at(flight.deadline):
                    body = await self._answer(request, _spec(match), record, flight)
                flight.hold(len(body))
            if record.error is not None:
                text, status = record.error.message.encode(errors="replace").decode(), record.error.http_status
                body = json.dumps({"error": text}).encode()
            return await self._send(request, body, status, flight)
        finally:
            if flight is not None:
                self._flights.end(flight)

    async def _answer(self, request: web.Request, spec: Any, record: Record, flight: Flight) -> bytes:
        if record.method == "Status":
            versions = [each.as_json() for each in self._front.status(spec, record)]
            return json.dumps({"model_version_status": versions}, indent=1).encode()
        self._front.check(spec, record)  # checked before the body is read
        body = await self._body(request, flight)
        encoding = request.headers.get("Content-Encoding", "identity").lower()[:50]
        return await self._front.forward(spec, record, flight, body, encoding)

    async def _body(self, request: web.Request, flight: Flight) -> bytearray:
        """Returns the body without decompressing it. Raises: RequestError: RESOURCE_EXHAUSTED: it exceeds the limit."""
        if (request.content_length or 0) > self._options.message_bytes:
            raise too_large(self._options.message_bytes)
        body = bytearray()
        try:
            while chunk := await request.content.readany():
                flight.hold(len(body) + len(chunk))
                body += chunk
                if len(body) > self._options.message_bytes:
                    raise too_large(self._options.message_bytes)
        except (http_exceptions.HttpProcessingError, web.RequestPayloadError) as error:
            raise invalid(f"The request is malformed: {error}") from None
        return body

    async def _send(self, request: web.Request, body: bytes, status: int, flight: Flight | None) -> web.StreamResponse:
        """Sends a response; a large one in pieces, each after the client has read the previous piece."""
        headers = {**self._headers, "Content-Type": "application/json"}
        if len(body) <= _SMALL_BYTES or flight is None:
            return web.Response(body=body, status=status, headers=headers)
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(body)
        try:
            await response.prepare(request)
            for begin in range(0, len(body), _PIECE):
                async with asyncio.timeout(self._options.timeout):
                    await response.write(memoryview(body)[begin : begin + _PIECE])
                flight.hold(len(body))
            await response.write_eof()
        except TimeoutError:  # the client does not read
            flight.drop()
        except ConnectionError:  # the client has left
            pass
        return response


def _spec(match: re.Match[str]) -> Any:
    spec = messages.message("ModelSpec")(name=match["name"])
    if match["version"] is not None:
        if len(match["version"]) > _MOST_DIGITS or int(match["version"]) >= 2**63:
            raise invalid(f"There is no version {match['version'][:30]}.")
        spec.version.value = int(match["version"])
    elif match["label"] is not None:
        spec.version_label = match["label"]
    return spec
