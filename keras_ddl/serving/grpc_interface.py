"""The gRPC interface: TensorFlow Serving's PredictionService and ModelService, and gRPC's own health service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

from keras_ddl.serving.handlers import Handlers
from keras_ddl.serving.metrics import Metrics
from keras_ddl.serving.status import Code, RequestError
from keras_ddl.serving.workers import Record

_CODES = {code.value[0]: code for code in grpc.StatusCode}
Method = Callable[[Any, Record], Awaitable[Any]]


class _Service:
    """Runs methods of `Handlers`, and turns what they raise into statuses."""

    def __init__(self, handlers: Handlers, metrics: Metrics) -> None:
        self._handlers, self._metrics = handlers, metrics

    async def _answer(self, name: str, method: Method, request: Any, context: Any) -> Any:
        record = Record("grpc", name)
        try:
            return await method(request, record)
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


class _PredictionService(_Service, prediction_service_pb2_grpc.PredictionServiceServicer):
    async def Predict(self, request: Any, context: Any) -> Any:
        return await self._answer("Predict", self._handlers.predict, request, context)

    async def Classify(self, request: Any, context: Any) -> Any:
        return await self._answer("Classify", self._handlers.classify, request, context)

    async def Regress(self, request: Any, context: Any) -> Any:
        return await self._answer("Regress", self._handlers.regress, request, context)

    async def MultiInference(self, request: Any, context: Any) -> Any:
        return await self._answer("MultiInference", self._handlers.multi_inference, request, context)

    async def GetModelMetadata(self, request: Any, context: Any) -> Any:
        return await self._answer("GetModelMetadata", self._handlers.get_model_metadata, request, context)


class _ModelService(_Service, model_service_pb2_grpc.ModelServiceServicer):
    async def GetModelStatus(self, request: Any, context: Any) -> Any:
        return await self._answer("GetModelStatus", self._handlers.get_model_status, request, context)

    async def HandleReloadConfigRequest(self, request: Any, context: Any) -> Any:
        return await self._answer("HandleReloadConfigRequest", self._handlers.reload_config, request, context)


class _Parsing(grpc.aio.ServerInterceptor):
    """Answers malformed messages with INVALID_ARGUMENT. gRPC itself returns UNKNOWN, as for a bug of the server."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler

        async def parse_and_answer(data: bytes, context: Any) -> Any:
            try:
                request = handler.request_deserializer(data)
            except DecodeError as error:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"This is not a valid message of {details.method}: {error}"
                )
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(parse_and_answer, response_serializer=handler.response_serializer)


class GrpcInterface:
    """The gRPC server on the running event loop."""

    def __init__(self, handlers: Handlers, metrics: Metrics, *, message_bytes: int) -> None:
        """`message_bytes`: of a request or an answer; a larger one is refused with RESOURCE_EXHAUSTED."""
        self._server = grpc.aio.server(
            interceptors=[_Parsing()],
            options=[
                ("grpc.max_receive_message_length", message_bytes),
                ("grpc.max_send_message_length", message_bytes),
                ("grpc.so_reuseport", 0),  # a port that is taken is an error
            ],
        )
        prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
            _PredictionService(handlers, metrics), self._server
        )
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(_ModelService(handlers, metrics), self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, host: str, port: int) -> int:
        """Returns the port; 0 chooses one. Raises: OSError: it is taken."""
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {host}:{port}: {error} Give another --port; 0 chooses one.") from None
        await self.show_health(False)
        await self._server.start()
        return bound

    async def show_health(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        await self._health.set("", states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, seconds: float) -> None:
        """Accepts no new requests, and waits this long for the running ones."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(seconds)
