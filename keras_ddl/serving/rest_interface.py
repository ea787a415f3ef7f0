"""The REST interface of TensorFlow Serving, its metrics path, and health for load balancers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from google.protobuf import json_format
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2

from keras_ddl.serving import examples, json_values, tensors
from keras_ddl.serving.handlers import Handlers
from keras_ddl.serving.metrics import Metrics
from keras_ddl.serving.status import Code, RequestError, invalid
from keras_ddl.serving.workers import Record, model_of

_MODEL = re.compile(
    r"/v1/models/(?P<name>[^/:]+)(/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
    r"(:(?P<method>\w+)|/(?P<metadata>metadata))?"
)
_METRICS = "/monitoring/prometheus/metrics"
_ALIVE, _READY = "/healthz", "/readyz"


class RestInterface:
    """The HTTP server on the running event loop."""

    def __init__(
        self,
        handlers: Handlers,
        metrics: Metrics,
        *,
        message_bytes: int,
        timeout: float,
        drain_seconds: float,
        metrics_path: str = _METRICS,
    ) -> None:
        """
        Args:
            message_bytes: of a request's body; a larger one is refused with 413.
            timeout: seconds in which a body must have come and be answered, else 504.
            drain_seconds: how long `stop` waits for requests under way.
        """
        self._handlers, self._metrics, self._timeout = handlers, metrics, timeout
        app = web.Application(client_max_size=message_bytes)
        app.router.add_get(metrics_path, self._get_metrics)
        app.router.add_get(_ALIVE, self._alive)
        app.router.add_get(_READY, self._ready)
        app.router.add_route("*", "/{rest:.*}", self._model)
        self._methods = {"predict": self._predict, "classify": self._examples, "regress": self._examples}
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, keepalive_timeout=75.0, shutdown_timeout=drain_seconds
        )
        self._is_ready = False

    async def start(self, host: str, port: int) -> int:
        """Returns the port; 0 chooses one. Raises: OSError: it is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_port=False)
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

    async def _model(self, request: web.Request) -> web.Response:
        found = _MODEL.fullmatch(request.path)
        record = Record("rest", "")
        answer: Callable[..., Awaitable[Any]] | None = None
        if found is not None:
            kind = found["method"] or found["metadata"] or "status"
            record.method, record.model = kind.capitalize(), found["name"]
            if found["method"] is None:
                answer = {"GET": self._metadata if found["metadata"] else self._status}.get(request.method)
            elif request.method == "POST":
                answer = self._methods.get(kind)
        return await self._respond(request, record, found, answer)

    async def _respond(self, request: web.Request, record: Record, found: Any, answer: Any) -> web.Response:
        status = 500
        try:
            if answer is None:
                raise invalid(f"Malformed request: {request.method} {request.path}")
            value = await asyncio.wait_for(answer(request, record, found), self._timeout)
            body, status = value if isinstance(value, str) else json.dumps(value), 200
        except RequestError as error:
            record.code, record.error, status = error.code, error.message, error.http_status
        except web.HTTPRequestEntityTooLarge as error:
            record.code, record.error, status = Code.RESOURCE_EXHAUSTED, error.text or "", 413
        except TimeoutError:
            record.code, status = Code.DEADLINE_EXCEEDED, 504
            record.error = f"The request was not answered within {self._timeout:g} s."
        except Exception as error:  # a defect of the server must not take it down
            record.code, record.error = Code.INTERNAL, f"{type(error).__name__}: {error}"
            self._metrics.log_exception(record, error)
        except BaseException:  # the client has left
            record.code = Code.CANCELLED
            raise
        finally:
            self._metrics.record_request(record, request.remote or "")
        if record.code != Code.OK:
            body = json.dumps({"error": record.error})
        return web.Response(body=body.encode(), status=status, content_type="application/json")

    async def _predict(self, request: web.Request, record: Record, found: Any) -> Any:
        body = json_values.parse(await request.read())
        with model_of(self._handlers.models, record, _spec(found, body)) as servable:
            signature = servable.signature(record.signature)
            arrays, in_rows = json_values.inputs_of(body, signature)
            feeds = tensors.check(signature, arrays)
            fetches = list(signature.outputs)
            outputs = await self._handlers.workers.run(servable, signature, feeds, fetches)
            return json_values.answer_of(fetches, outputs, in_rows)

    async def _examples(self, request: web.Request, record: Record, found: Any) -> Any:
        """Classify and regress: the examples are those of the gRPC interface, and so is the answer."""
        from tensorflow_serving.apis import classification_pb2, regression_pb2

        body = json_values.parse(await request.read())
        rows = body.get("examples")
        if not isinstance(rows, list) or not rows:
            raise invalid(f'A {found["method"]} request has a list of "examples". Received: {sorted(body)}.')
        messages = {"classify": classification_pb2.ClassificationRequest, "regress": regression_pb2.RegressionRequest}
        message = messages[found["method"]]()
        message.model_spec.CopyFrom(_spec(found, body))
        made = [examples.of_features(json_values.features_of(row)) for row in rows]
        if "context" in body:
            with_context = message.input.example_list_with_context
            with_context.context.CopyFrom(examples.of_features(json_values.features_of(body["context"])))
            with_context.examples.extend(made)
        else:
            message.input.example_list.examples.extend(made)
        if found["method"] == "regress":
            answer = await self._handlers.regress(message, record)
            return {"result": [each.value for each in answer.result.regressions]}
        answer = await self._handlers.classify(message, record)
        return {"result": [[[one.label, one.score] for one in each.classes] for each in answer.result.classifications]}

    async def _status(self, request: web.Request, record: Record, found: Any) -> Any:
        message = get_model_status_pb2.GetModelStatusRequest(model_spec=_spec(found, {}))
        return _as_json(await self._handlers.get_model_status(message, record))

    async def _metadata(self, request: web.Request, record: Record, found: Any) -> Any:
        message = get_model_metadata_pb2.GetModelMetadataRequest(
            model_spec=_spec(found, {}), metadata_field=["signature_def"]
        )
        return _as_json(await self._handlers.get_model_metadata(message, record))


def _spec(found: Any, body: dict[str, Any]) -> Any:
    from tensorflow_serving.apis import model_pb2

    name = body.get("signature_name", "")
    if not isinstance(name, str):
        raise invalid(f'"signature_name" is a string. Received: {name!r}.')
    spec = model_pb2.ModelSpec(name=found["name"], signature_name=name)
    if found["version"] is not None:
        if int(found["version"]) >= 2**63:
            raise invalid(f"There is no version {found['version'][:30]}.")
        spec.version.value = int(found["version"])
    elif found["label"] is not None:
        spec.version_label = found["label"]
    return spec


def _as_json(message: Any) -> str:
    return json_format.MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
