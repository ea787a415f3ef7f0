"""The methods of PredictionService and ModelService on serialized messages, and what REST shares of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    model_pb2,
    regression_pb2,
)

from keras_ddl.errors import ConfigError
from keras_ddl.serving import examples, messages, model_config, tensors
from keras_ddl.serving.limits import Held, Unpacked
from keras_ddl.serving.model_manager import ModelManager
from keras_ddl.serving.servable import CLASSIFY, REGRESS, Servable, Signature
from keras_ddl.serving.status import Code, RequestError, invalid
from keras_ddl.serving.workers import Record, Workers, model_of

_SIGNATURE_DEF = "signature_def"
_LARGE_BYTES = 100_000  # what is read in a thread: reading less takes no longer than the hand-over
_CONTROL_BYTES = 2**20  # of requests that are not for a model's computing


class Handlers:
    """Handles requests on the event loop; models run on the workers."""

    def __init__(
        self,
        models: ModelManager,
        workers: Workers,
        *,
        message_bytes: int,
        as_content: bool = False,
        check_method_names: bool = False,
        allow_reload: bool = False,
        reload_seconds: float = 600.0,
    ) -> None:
        """
        Args:
            message_bytes: of all arrays of a request together.
            as_content: how answers over gRPC hold numbers, see `tensors.field_of`.
            check_method_names: signatures must say that they are for Classify or Regress.
            allow_reload: whether HandleReloadConfigRequest is answered.
            reload_seconds: how long a new list of models may take to load.
        """
        self.models, self.workers = models, workers
        self._message_bytes, self._as_content = message_bytes, as_content
        self._check_method_names = check_method_names
        self._allow_reload, self._reload_seconds = allow_reload, reload_seconds

    async def predict(self, data: bytes, record: Record, held: Held) -> bytes:
        unpacked = Unpacked(self._message_bytes)
        request = await _read(data, messages.predict_request, data, unpacked)
        with model_of(self.models, record, request.spec) as servable:
            signature = servable.signature(request.spec.signature_name)
            fetches = tensors.outputs_of(signature, request.output_filter)
            arrays = await _read(data, messages.arrays_of, request, signature, unpacked)
            held.add(unpacked.bytes)
            outputs = await self.workers.run(servable, signature, arrays, fetches)
            spec, named = _spec_of(servable, signature), list(zip(fetches, outputs))
            size = sum(array.nbytes for array in outputs)
            if size > _LARGE_BYTES:
                held.add(size)
                return await asyncio.to_thread(messages.predict_response, spec, named, as_content=self._as_content)
            return messages.predict_response(spec, named, as_content=self._as_content)

    async def classify(self, data: bytes, record: Record, held: Held) -> bytes:
        types = classification_pb2.ClassificationRequest, classification_pb2.ClassificationResponse
        return await self._answer_examples(data, record, held, *types, self.classify_rows)

    async def regress(self, data: bytes, record: Record, held: Held) -> bytes:
        types = regression_pb2.RegressionRequest, regression_pb2.RegressionResponse
        return await self._answer_examples(data, record, held, *types, self.regress_rows)

    async def _answer_examples(
        self,
        data: bytes,
        record: Record,
        held: Held,
        type_of_request: Any,
        type_of_response: Any,
        answer: Callable[[Servable, Signature, np.ndarray], Awaitable[Any]],
    ) -> bytes:
        message, rows = await self._examples(data, type_of_request, held)
        with model_of(self.models, record, message.model_spec) as servable:
            signature = servable.signature(message.model_spec.signature_name)
            result = await answer(servable, signature, rows)
            return type_of_response(model_spec=_spec_of(servable, signature), result=result).SerializeToString()

    async def multi_inference(self, data: bytes, record: Record, held: Held) -> bytes:
        message, rows = await self._examples(data, inference_pb2.MultiInferenceRequest, held)
        if not message.tasks:
            raise invalid("Inference request must contain at least one task.")
        specs = [task.model_spec for task in message.tasks]
        if len({(spec.name, spec.version.value, spec.version_label) for spec in specs}) > 1:
            raise invalid("All model_specs in a MultiInferenceRequest must access the same model name.")
        names = [spec.signature_name for spec in specs]
        if len(set(names)) < len(names):
            raise invalid(f"Duplicate evaluation of signature: {names[:10]}")
        response = inference_pb2.MultiInferenceResponse()
        with model_of(self.models, record, specs[0]) as servable:
            for task in message.tasks:
                signature = servable.signature(task.model_spec.signature_name)
                result = response.results.add(model_spec=_spec_of(servable, signature))
                if task.method_name == CLASSIFY:
                    found = await self.classify_rows(servable, signature, rows)
                    result.classification_result.CopyFrom(found)
                elif task.method_name == REGRESS:
                    result.regression_result.CopyFrom(await self.regress_rows(servable, signature, rows))
                else:
                    raise RequestError(Code.UNIMPLEMENTED, f"Unsupported signature method_name: {task.method_name}")
        return response.SerializeToString()

    async def _examples(self, data: bytes, type_of_request: Any, held: Held) -> tuple[Any, np.ndarray]:
        unpacked = Unpacked(self._message_bytes)
        message, rows = await _read(data, messages.examples_request, data, type_of_request, unpacked)
        held.add(unpacked.bytes)
        return message, rows

    async def classify_rows(self, servable: Servable, signature: Signature, rows: np.ndarray) -> Any:
        """Returns the ClassificationResult of serialized examples."""
        outputs = await self._on_examples(servable, signature, CLASSIFY, rows)
        result = classification_pb2.ClassificationResult()
        for classes in examples.classifications(outputs, len(rows)):
            answer = result.classifications.add()
            for label, score in classes:
                answer.classes.add(label=label, score=score)
        return result

    async def regress_rows(self, servable: Servable, signature: Signature, rows: np.ndarray) -> Any:
        """Returns the RegressionResult of serialized examples."""
        outputs = await self._on_examples(servable, signature, REGRESS, rows)
        result = regression_pb2.RegressionResult()
        for value in examples.regressions(outputs, len(rows)):
            result.regressions.add(value=value)
        return result

    async def _on_examples(
        self, servable: Servable, signature: Signature, method: str, rows: np.ndarray
    ) -> dict[str, np.ndarray]:
        examples.check(signature, method, by_name=self._check_method_names)
        fetches: Sequence[str] = examples.fetches(signature, method)
        outputs = await self.workers.run(servable, signature, {examples.INPUT: rows}, fetches)
        return dict(zip(fetches, outputs))

    async def get_model_metadata(self, data: bytes, record: Record, held: Held) -> bytes:
        request = _parsed(get_model_metadata_pb2.GetModelMetadataRequest, data)
        return self.metadata(request, record).SerializeToString()

    def metadata(self, request: Any, record: Record) -> Any:
        if not request.metadata_field:
            raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
        for name in request.metadata_field:
            if name != _SIGNATURE_DEF:
                raise invalid(f"Metadata field {name} is not supported")
        with model_of(self.models, record, request.model_spec) as servable:
            response = get_model_metadata_pb2.GetModelMetadataResponse()
            response.model_spec.name = servable.name
            response.model_spec.version.value = servable.version
            signatures = get_model_metadata_pb2.SignatureDefMap()
            for name, definition in servable.signature_defs.items():
                signatures.signature_def[name].CopyFrom(definition)
            packed = any_pb2.Any()
            packed.Pack(signatures)
            response.metadata[_SIGNATURE_DEF].CopyFrom(packed)
            return response

    async def get_model_status(self, data: bytes, record: Record, held: Held) -> bytes:
        return self.status(_parsed(get_model_status_pb2.GetModelStatusRequest, data), record).SerializeToString()

    def status(self, request: Any, record: Record) -> Any:
        spec = request.model_spec
        record.model = spec.name
        choice = spec.WhichOneof("version_choice")
        number = spec.version.value if choice == "version" else None
        if not spec.name:
            raise invalid("The request does not name a model (model_spec.name).")
        response = get_model_status_pb2.GetModelStatusResponse()
        label = spec.version_label if choice == "version_label" else ""
        for version in self.models.status(spec.name, number, label):
            found = response.model_version_status.add(version=version.number, state=int(version.state))
            found.status.error_code = int(Code.UNKNOWN if version.error else Code.OK)
            found.status.error_message = version.error
        return response

    async def reload_config(self, data: bytes, record: Record, held: Held) -> bytes:
        if not self._allow_reload:
            raise RequestError(
                Code.PERMISSION_DENIED,
                "This server does not take lists of models from clients. Start it with --allow-reload-config.",
            )
        request = _parsed(model_management_pb2.ReloadConfigRequest, data)
        try:
            configs = model_config.of_proto(request.config)
        except ConfigError as error:
            raise invalid(str(error)) from None
        if request.config.WhichOneof("config") is None:
            raise invalid("The request has no config, so the server would serve nothing. Send a model_config_list.")
        response = model_management_pb2.ReloadConfigResponse()
        error = await asyncio.to_thread(self.models.reload, configs, self._reload_seconds)
        if error is not None:
            response.status.error_code, response.status.error_message = int(error.code), error.message
        return response.SerializeToString()


async def _read(data: bytes, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that reads `data`: in a thread if there is much of it."""
    return await asyncio.to_thread(function, *arguments) if len(data) > _LARGE_BYTES else function(*arguments)


def _parsed(type_of_message: Any, data: bytes) -> Any:
    if len(data) > _CONTROL_BYTES:
        raise RequestError(
            Code.RESOURCE_EXHAUSTED, f"The request may have {_CONTROL_BYTES} bytes. Received: {len(data)}."
        )
    try:
        return type_of_message.FromString(data)
    except DecodeError as error:
        raise invalid(f"This is not a valid {type_of_message.DESCRIPTOR.full_name}: {error}") from None


def _spec_of(servable: Servable, signature: Signature) -> Any:
    spec = model_pb2.ModelSpec(name=servable.name, signature_name=signature.name)
    spec.version.value = servable.version
    return spec
