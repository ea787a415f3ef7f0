"""The methods of PredictionService and ModelService on protocol buffers, for both interfaces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from google.protobuf import any_pb2
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    predict_pb2,
    regression_pb2,
)

from keras_ddl.errors import ConfigError
from keras_ddl.serving import examples, model_config, tensors
from keras_ddl.serving.model_manager import ModelManager
from keras_ddl.serving.servable import CLASSIFY, REGRESS, Servable, Signature
from keras_ddl.serving.status import Code, RequestError, invalid
from keras_ddl.serving.workers import Record, Workers, model_of

_SIGNATURE_DEF = "signature_def"


class Handlers:
    """Handles requests on the event loop; models run on the workers."""

    def __init__(
        self, models: ModelManager, workers: Workers, *, limit_bytes: int, reload_seconds: float = 600.0
    ) -> None:
        """
        Args:
            limit_bytes: of one input.
            reload_seconds: how long a new list of models may take to load.
        """
        self.models, self.workers = models, workers
        self._limit_bytes, self._reload_seconds = limit_bytes, reload_seconds

    async def predict(self, request: Any, record: Record) -> Any:
        with model_of(self.models, record, request.model_spec) as servable:
            signature = servable.signature(request.model_spec.signature_name)
            arrays = {
                alias: tensors.array_of(alias, proto, self._limit_bytes) for alias, proto in request.inputs.items()
            }
            feeds = tensors.check(signature, arrays)
            fetches = tensors.outputs_of(signature, request.output_filter)
            outputs = await self.workers.run(servable, signature, feeds, fetches)
            response = predict_pb2.PredictResponse()
            _fill_spec(response.model_spec, servable, signature)
            for alias, array in zip(fetches, outputs):
                response.outputs[alias].CopyFrom(tensors.proto_of(array))
            return response

    async def classify(self, request: Any, record: Record) -> Any:
        response = classification_pb2.ClassificationResponse()
        return await self._fill_result(request, record, self._classify, response)

    async def regress(self, request: Any, record: Record) -> Any:
        return await self._fill_result(request, record, self._regress, regression_pb2.RegressionResponse())

    async def _fill_result(self, request: Any, record: Record, method: Callable[..., Awaitable[Any]], into: Any) -> Any:
        with model_of(self.models, record, request.model_spec) as servable:
            signature = servable.signature(request.model_spec.signature_name)
            into.result.CopyFrom(await method(servable, signature, examples.serialized(request.input)))
            _fill_spec(into.model_spec, servable, signature)
            return into

    async def multi_inference(self, request: Any, record: Record) -> Any:
        if not request.tasks:
            raise invalid("Inference request must contain at least one task.")
        specs = [task.model_spec for task in request.tasks]
        if len({(spec.name, spec.version.value, spec.version_label) for spec in specs}) > 1:
            raise invalid("All model_specs in a MultiInferenceRequest must access the same model.")
        names = [spec.signature_name for spec in specs]
        if len(set(names)) < len(names):
            raise invalid(f"Duplicate evaluation of signature: {names}")
        serialized = examples.serialized(request.input)
        response = inference_pb2.MultiInferenceResponse()
        with model_of(self.models, record, specs[0]) as servable:
            for task in request.tasks:
                signature = servable.signature(task.model_spec.signature_name)
                result = response.results.add()
                _fill_spec(result.model_spec, servable, signature)
                if task.method_name == CLASSIFY:
                    found = await self._classify(servable, signature, serialized)
                    result.classification_result.CopyFrom(found)
                elif task.method_name == REGRESS:
                    result.regression_result.CopyFrom(await self._regress(servable, signature, serialized))
                else:
                    raise RequestError(Code.UNIMPLEMENTED, f"Unsupported signature method_name: {task.method_name}")
        return response

    async def _classify(self, servable: Servable, signature: Signature, serialized: np.ndarray) -> Any:
        outputs = await self._on_examples(servable, signature, CLASSIFY, serialized)
        result = classification_pb2.ClassificationResult()
        for classes in examples.classifications(outputs, len(serialized)):
            answer = result.classifications.add()
            for label, score in classes:
                answer.classes.add(label=label, score=score)
        return result

    async def _regress(self, servable: Servable, signature: Signature, serialized: np.ndarray) -> Any:
        outputs = await self._on_examples(servable, signature, REGRESS, serialized)
        result = regression_pb2.RegressionResult()
        for value in examples.regressions(outputs, len(serialized)):
            result.regressions.add(value=value)
        return result

    async def _on_examples(
        self, servable: Servable, signature: Signature, method: str, serialized: np.ndarray
    ) -> dict[str, np.ndarray]:
        examples.check_method(signature, method)
        fetches = examples.fetches(signature)
        outputs = await self.workers.run(servable, signature, {examples.INPUT: serialized}, fetches)
        return dict(zip(fetches, outputs))

    async def get_model_metadata(self, request: Any, record: Record) -> Any:
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

    async def get_model_status(self, request: Any, record: Record) -> Any:
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

    async def reload_config(self, request: Any, record: Record) -> Any:
        response = model_management_pb2.ReloadConfigResponse()
        try:
            configs = model_config.of_proto(request.config)
        except ConfigError as error:
            raise invalid(str(error)) from None
        if request.config.WhichOneof("config") is None:
            raise invalid("The request has no config, so the server would serve nothing. Send a model_config_list.")
        await asyncio.get_running_loop().run_in_executor(None, self.models.reload, configs, self._reload_seconds)
        return response


def _fill_spec(spec: Any, servable: Servable, signature: Signature) -> None:
    spec.name, spec.signature_name = servable.name, signature.name
    spec.version.value = servable.version
