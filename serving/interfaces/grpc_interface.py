"""The gRPC interface: TensorFlow Serving's PredictionService and ModelService, and gRPC's own health service.

Serialized messages are forwarded to the model processes and back unchanged.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from keras_ddl.errors import ConfigError
from keras_ddl.serving import model_config
from keras_ddl.serving.interfaces.connections import GrpcConnections, disconnect
from keras_ddl.serving.interfaces.flights import Flight, Flights
from keras_ddl.serving.interfaces.front import Front
from keras_ddl.serving.metrics import Record
from keras_ddl.serving.protocol import bodies, routing
from keras_ddl.serving.protocol.status import Code, RequestError, invalid
from keras_ddl.serving.settings import Options

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_CONTROL_BYTES = 2**18  # largest request that the server answers itself
_RELOAD_SECONDS = 600.0  # limit for loading a new list of models
_STREAMS = 100  # concurrent streams per connection
_MOST_PENDING = (1000, 3000)  # unprocessed requests: gRPC refuses some above the first, all above the second
_METHODS: Mapping[str, Sequence[str]] = {
    "tensorflow.serving.PredictionService": ("Predict", "Classify", "Regress", "MultiInference", "GetModelMetadata"),
    "tensorflow.serving.ModelService": ("GetModelStatus", "HandleReloadConfigRequest"),
    "grpc.health.v1.Health": ("Check",),
}
_SERVICES = ("", *list(_METHODS)[:2])


class GrpcInterface:
    """The gRPC server on the running event loop."""

    def __init__(self, front: Front, flights: Flights, options: Options, connections: int) -> None:
        """`connections`: the limit on open connections; beyond it, the oldest one without a request is closed."""
        self._front, self._flights, self._options = front, flights, options
        self._connections = GrpcConnections(connections)
        self._watching: asyncio.Task | None = None
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", options.message_bytes),
                ("grpc.max_send_message_length", options.message_bytes),
                ("grpc.so_reuseport", 0),  # makes a port in use an error
                ("grpc.per_message_decompression", 0),  # the model processes decompress (protocol/bodies.py)
                ("grpc.http2.bdp_probe", 0),  # probes would widen the windows of streams that nobody reads
                ("grpc.max_concurrent_streams", _STREAMS),
                ("grpc.server.max_pending_requests", _MOST_PENDING[0]),
                ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING[1]),
                ("grpc.max_allowed_incoming_connections", self._connections.accepted),
                ("grpc.max_connection_idle_ms", int(options.idle_seconds * 1000)),
                ("grpc.server_handshake_timeout_ms", int(options.idle_seconds * 1000)),
                *options.grpc_options,
            ],
        )
        handlers = {service: {name: self._handler(name) for name in names} for service, names in _METHODS.items()}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, methods) for service, methods in handlers.items()]
        )

    def _handler(self, name: str) -> Any:
        async def answer(_: Any, context: Any) -> bytes | None:
            return await self._answer(name, context)

        # With a stream the server reads the request itself, so it can time out if the message never arrives.
        return grpc.stream_unary_rpc_method_handler(answer)

    async def _answer(self, name: str, context: Any) -> bytes | None:
        record, task, flight = Record("grpc", name), asyncio.current_task(), None
        assert task is not None

        def drop() -> None:
            task.cancel()

        try:
            with self._front.answering(record, context.peer()):
                flight = self._flights.begin(drop)
                flight.peer = context.peer()
                context.add_done_callback(lambda _: self._flights.end(flight))
                # Does not name the message, because gRPC keeps an aborted call's frame until the next garbage
                # collection.
                return self._sent(
                    flight, context, await self._dispatch(name, await self._read(name, context, flight), record, flight)
                )
        except asyncio.CancelledError:
            if flight is None or not flight.is_dropped:
                raise
            task.uncancel()
            record.error = RequestError(
                Code.RESOURCE_EXHAUSTED, "The request was dropped: it had not fully arrived, and others waited."
            )
        assert record.error is not None
        await context.abort(_CODES[int(record.error.code)], record.error.message)
        return None

    def _sent(self, flight: Flight, context: Any, answer: bytes) -> bytes:
        flight.hold(2 * len(answer))  # gRPC keeps a second copy until the client has read it
        flight.drop = functools.partial(disconnect, context.peer())
        flight.drop_after(self._options.timeout)
        return answer

    async def _read(self, name: str, context: Any, flight: Flight) -> bytes:
        self._flights.await_message(flight)
        try:
            async with asyncio.timeout_at(flight.deadline):
                data = await context.read()
        finally:
            self._flights.message_received(flight)
        if not isinstance(data, bytes):
            raise invalid(f"{name} takes one message. Received: none.")
        self._connections.used(flight.peer)
        flight.hold(len(data))
        return data

    async def _dispatch(self, name: str, data: bytes, record: Record, flight: Flight) -> bytes:
        encoding = bodies.encoding_of(data)
        if name in _METHODS["tensorflow.serving.PredictionService"]:
            spec = routing.spec_of(bodies.beginning(data, encoding), in_task=name == "MultiInference")
            async with asyncio.timeout_at(flight.deadline):
                return await self._front.forward(spec, record, flight, data, encoding)
        if len(data) > _CONTROL_BYTES:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED, f"The request may have at most {_CONTROL_BYTES} bytes. Received: {len(data)}."
            )
        data = bodies.inflated(data, encoding, _CONTROL_BYTES)
        if name == "GetModelStatus":
            return routing.status_response(self._front.status(routing.spec_of(data), record))
        if name == "Check":
            return self._health(data)
        return await self._reload(data)

    async def _reload(self, data: bytes) -> bytes:
        if not self._options.allow_reload:
            raise RequestError(
                Code.PERMISSION_DENIED,
                "This server does not accept lists of models from clients. Start it with --allow-reload-config.",
            )
        try:
            configs = model_config.models_from_bytes(b"".join(routing.field_1(data)))
        except ConfigError as error:
            raise invalid(str(error)) from None
        return routing.reload_response(await self._front.models.reload(configs, _RELOAD_SECONDS))

    def _health(self, data: bytes) -> bytes:
        service = b"".join(bytes(part[:1000]) for part in routing.field_1(data)[:1])
        if service.decode(errors="replace") not in _SERVICES:
            raise RequestError(Code.NOT_FOUND, "There is no such service.")
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self._front.ready else states.NOT_SERVING).SerializeToString()

    # ---- start and stop ------------------------------------------------------------------------------------------

    async def start(self, addresses: Sequence[str]) -> list[int]:
        """Listens on "host:port" (port 0 chooses one) and "unix:path". Returns the ports.

        Raises: OSError: an address is in use.
        """
        ports = []
        for address in addresses:
            try:
                ports.append(self._server.add_insecure_port(address))
            except RuntimeError as error:
                raise OSError(f"gRPC cannot listen on {address}: {error} Give another --port; 0 chooses one.") from None
        await self._server.start()
        self._watching = asyncio.create_task(self._connections.watch(ports[0], self._flights.peers))
        return ports

    async def stop(self, seconds: float) -> None:
        """Accepts no new requests, and waits this long for the running ones."""
        await self._server.stop(seconds)
        if self._watching is not None:
            self._watching.cancel()
