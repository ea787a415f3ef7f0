"""The gRPC interface: TensorFlow Serving's PredictionService and ModelService, and gRPC's own health service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from keras_ddl.serving.handlers import Handlers
from keras_ddl.serving.limits import Held, Memory
from keras_ddl.serving.metrics import Metrics
from keras_ddl.serving.reading_turns import ReadingTurns
from keras_ddl.serving.status import Code, RequestError, invalid
from keras_ddl.serving.workers import Record

_CODES = {code.value[0]: code for code in grpc.StatusCode}
Method = Callable[[bytes, Record, Held], Awaitable[bytes]]


class GrpcInterface:
    """The gRPC server on the running event loop."""

    def __init__(
        self,
        handlers: Handlers,
        metrics: Metrics,
        memory: Memory,
        turns: ReadingTurns,
        *,
        message_bytes: int,
        max_calls: int | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """
        Args:
            memory: what all requests that have come may hold.
            turns: in which requests come.
            message_bytes: of a request or an answer; a larger one is refused with RESOURCE_EXHAUSTED.
            max_calls: how many may be under way at the same time; the next is refused with RESOURCE_EXHAUSTED.
            options: more of gRPC's channel arguments.
        """
        self._metrics, self._memory = metrics, memory
        self._turns, self._message_bytes = turns, message_bytes
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=max_calls,
            options=[
                ("grpc.max_receive_message_length", message_bytes),
                ("grpc.max_send_message_length", message_bytes),
                ("grpc.so_reuseport", 0),  # a port that is taken is an error
                ("grpc.http2.bdp_probe", 0),  # it widens the windows of streams that nobody reads from
                *options,
            ],
        )
        services: Mapping[str, Mapping[str, Method]] = {
            "PredictionService": {
                "Predict": handlers.predict,
                "Classify": handlers.classify,
                "Regress": handlers.regress,
                "MultiInference": handlers.multi_inference,
                "GetModelMetadata": handlers.get_model_metadata,
            },
            "ModelService": {
                "GetModelStatus": handlers.get_model_status,
                "HandleReloadConfigRequest": handlers.reload_config,
            },
        }
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    f"tensorflow.serving.{service}",
                    {name: self._handler(name, method) for name, method in methods.items()},
                )
                for service, methods in services.items()
            ]
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def _handler(self, name: str, method: Method) -> Any:
        async def answer(_: Any, context: Any) -> bytes | None:
            return await self._answer(name, method, context)

        # Messages stay as they come: google.protobuf would unpack them before anybody has looked at them. For the
        # server of a stream, a request is read when it is asked for, so that one that never comes is noticed.
        return grpc.stream_unary_rpc_method_handler(answer)

    async def _answer(self, name: str, method: Method, context: Any) -> bytes | None:
        record = Record("grpc", name)
        try:
            with self._memory.held() as held:
                # No name for the message in here: gRPC keeps this frame, until the next collection of garbage, of
                # every call that is aborted.
                return await method(await self._read(name, context, held), record, held)
        except RequestError as error:
            record.code, record.error = error.code, error.message
        except Exception as error:  # a bug must not take the server down
            record.code, record.error = Code.INTERNAL, f"{type(error).__name__}: {error}"
            self._metrics.log_exception(record, error)
        except BaseException:  # the client has disconnected, or its deadline has passed
            record.code = Code.CANCELLED
            raise
        finally:
            self._metrics.record_request(record, context.peer())
        await context.abort(_CODES[int(record.code)], record.error)
        return None

    async def _read(self, name: str, context: Any, held: Held) -> bytes:
        data = None
        try:
            async with self._turns.turn():
                data = await context.read()
        finally:
            if not isinstance(data, bytes):
                self._memory.note(self._message_bytes)  # as much of it may have come
        if not isinstance(data, bytes):
            raise invalid(f"{name} takes one message. Received: none.")
        held.add(len(data))
        return data

    async def start(self, addresses: Sequence[str], credentials: Any = None) -> list[int]:
        """Listens on "host:port" (port 0 chooses one) and "unix:path". Returns the ports.

        Args:
            credentials: of the server, for TLS.
        Raises: OSError: one is taken.
        """
        ports = []
        for address in addresses:
            try:
                if credentials is None or address.startswith("unix:"):
                    ports.append(self._server.add_insecure_port(address))
                else:
                    ports.append(self._server.add_secure_port(address, credentials))
            except RuntimeError as error:
                raise OSError(f"gRPC cannot listen on {address}: {error} Give another --port; 0 chooses one.") from None
        await self.show_health(False)
        await self._server.start()
        return ports

    async def show_health(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for service in ("", "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService"):
            await self._health.set(service, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, seconds: float) -> None:
        """Accepts no new requests, and waits this long for the running ones."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(seconds)
