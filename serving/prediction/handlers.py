"""Answers requests in the process of a model version: turns a request's bytes into the response's bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import any_pb2, json_format
from google.protobuf.message import DecodeError

from keras_ddl.serving.prediction import examples, json_values, tensors
from keras_ddl.serving.prediction.servable import CLASSIFY, REGRESS, Servable, Signature
from keras_ddl.serving.protocol import bodies
from keras_ddl.serving.protocol.messages import message
from keras_ddl.serving.protocol.status import Code, RequestError, invalid
from keras_ddl.serving.settings import Options

_SIGNATURE_DEF = "signature_def"


class Handlers:
    """Handles the requests of one version, in any thread.

    Methods get `reply`, the fields of the reply without its body, and set "signature" in it, even before they raise.
    """

    def __init__(self, servable: Servable, options: Options) -> None:
        self._servable, self._run, self._options = servable, servable.run, options
        # Method -> the type of its request, and its handler.
        self._grpc: Mapping[str, tuple[Any, Callable[[Any, dict[str, Any]], Any]]] = {
            "Predict": (message("PredictRequest"), self._predict),
            "Classify": (message("ClassificationRequest"), self._classify),
            "Regress": (message("RegressionRequest"), self._regress),
            "MultiInference": (message("MultiInferenceRequest"), self._multi_inference),
            "GetModelMetadata": (message("GetModelMetadataRequest"), self._get_model_metadata),
        }
        self._rest: Mapping[str, Callable[[bytes, dict[str, Any]], bytes]] = {
            "Predict": self._rest_predict,
            "Classify": self._rest_classify,
            "Regress": self._rest_regress,
            "Metadata": self._rest_metadata,
        }

    def answer(self, protocol: str, method: str, encoding: str, data: bytes, reply: dict[str, Any]) -> bytes:
        """Returns the body of the response.

        Args:
            protocol: "grpc" or "rest".
            encoding: Content-Encoding of the data.
        Raises: RequestError.
        """
        data = bodies.inflated(data, encoding, self._options.message_bytes)
        if protocol == "rest":
            return self._rest[method](data, reply)
        request = _parsed(self._grpc[method][0], data)
        spec = request.tasks[0].model_spec if method == "MultiInference" and request.tasks else request.model_spec
        # Checked again, because protocol/routing.py reads only the first fields.
        if spec.name != self._servable.name or spec.version.value not in (0, self._servable.version):
            raise invalid("The model_spec must be the first field of a request, and occur once.")
        answer = self.respond(method, request, reply).SerializeToString()
        if len(answer) > self._options.message_bytes:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"The answer has {len(answer)} bytes, more than --max-message-mb. Send fewer rows.",
            )
        return answer

    def respond(self, method: str, request: Any, reply: dict[str, Any]) -> Any:
        """Returns the response to a gRPC message; does not check the model's name. Raises: RequestError."""
        return self._grpc[method][1](request, reply)

    # ---- gRPC ----------------------------------------------------------------------------------------------------

    def _predict(self, request: Any, reply: dict[str, Any]) -> Any:
        signature = self._signature(request.model_spec, reply)
        fetches = tensors.outputs_of(signature, request.output_filter)
        feeds = tensors.feeds_of(signature, request.inputs)
        response = message("PredictResponse")(model_spec=self._spec_of(signature))
        for alias, array in zip(fetches, self._run(signature, {**signature.defaults, **feeds}, fetches)):
            response.outputs[alias].CopyFrom(tensors.proto_of(array, as_content=self._options.as_tensor_content))
        return response

    def _classify(self, request: Any, reply: dict[str, Any]) -> Any:
        signature = self._signature(request.model_spec, reply)
        result = self._classify_rows(signature, examples.rows_of(request.input))
        return message("ClassificationResponse")(model_spec=self._spec_of(signature), result=result)

    def _regress(self, request: Any, reply: dict[str, Any]) -> Any:
        signature = self._signature(request.model_spec, reply)
        result = self._regress_rows(signature, examples.rows_of(request.input))
        return message("RegressionResponse")(model_spec=self._spec_of(signature), result=result)

    def _multi_inference(self, request: Any, reply: dict[str, Any]) -> Any:
        if not request.tasks:
            raise invalid("Inference request must contain at least one task.")
        specs = [task.model_spec for task in request.tasks]
        if len({(spec.name, spec.version.value, spec.version_label) for spec in specs}) > 1:
            raise invalid("All model_specs in a MultiInferenceRequest must access the same model name.")
        names = [spec.signature_name for spec in specs]
        if len(set(names)) < len(names):
            raise invalid(f"Duplicate evaluation of signature: {names[:10]}")
        rows = examples.rows_of(request.input)
        response = message("MultiInferenceResponse")()
        for task in request.tasks:
            signature = self._signature(task.model_spec, reply)
            result = response.results.add(model_spec=self._spec_of(signature))
            if task.method_name == CLASSIFY:
                result.classification_result.CopyFrom(self._classify_rows(signature, rows))
            elif task.method_name == REGRESS:
                result.regression_result.CopyFrom(self._regress_rows(signature, rows))
            else:
                raise RequestError(Code.UNIMPLEMENTED, f"Unsupported signature method_name: {task.method_name}")
        return response

    def _get_model_metadata(self, request: Any, reply: dict[str, Any]) -> Any:
        if not request.metadata_field:
            raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
        for name in request.metadata_field:
            if name != _SIGNATURE_DEF:
                raise invalid(f"Metadata field {name[:100]} is not supported")
        return self._metadata()

    def _metadata(self) -> Any:
        response = message("GetModelMetadataResponse")()
        response.model_spec.name = self._servable.name
        response.model_spec.version.value = self._servable.version
        signatures = message("SignatureDefMap")()
        for name, definition in self._servable.signature_defs.items():
            signatures.signature_def[name].CopyFrom(definition)
        packed = any_pb2.Any()
        packed.Pack(signatures)
        response.metadata[_SIGNATURE_DEF].CopyFrom(packed)
        return response

    # ---- REST ----------------------------------------------------------------------------------------------------

    def _rest_predict(self, data: bytes, reply: dict[str, Any]) -> bytes:
        request = json_values.predict_request(data, self._servable.signatures)
        signature = request.signature
        reply["signature"] = signature.name
        fetches = list(signature.outputs)
        outputs = self._run(signature, {**signature.defaults, **request.inputs}, fetches)
        return json_values.predict_response(fetches, outputs, request.in_rows)

    def _rest_classify(self, data: bytes, reply: dict[str, Any]) -> bytes:
        result = self._classify_rows(*self._rest_rows(data, reply))
        answers = [[[one.label, one.score] for one in each.classes] for each in result.classifications]
        return json.dumps({"results": answers}).encode()

    def _rest_regress(self, data: bytes, reply: dict[str, Any]) -> bytes:
        result = self._regress_rows(*self._rest_rows(data, reply))
        return json.dumps({"results": [each.value for each in result.regressions]}).encode()

    def _rest_rows(self, data: bytes, reply: dict[str, Any]) -> tuple[Signature, np.ndarray]:
        signature, rows = json_values.examples_request(data, self._servable.signatures)
        reply["signature"] = signature.name
        array = np.empty(len(rows), dtype=object)
        array[:] = rows
        return signature, array

    def _rest_metadata(self, data: bytes, reply: dict[str, Any]) -> bytes:
        answer = json_format.MessageToDict(
            self._metadata(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for each in answer["metadata"].values():
            del each["@type"]  # TensorFlow Serving omits it
        return json.dumps(answer, indent=1).encode()

    # ---- both ----------------------------------------------------------------------------------------------------

    def _signature(self, spec: Any, reply: dict[str, Any]) -> Signature:
        reply["signature"] = spec.signature_name[:100]
        return self._servable.signature(spec.signature_name)

    def _spec_of(self, signature: Signature) -> Any:
        spec = message("ModelSpec")(name=self._servable.name, signature_name=signature.name)
        spec.version.value = self._servable.version
        return spec

    def _classify_rows(self, signature: Signature, rows: np.ndarray) -> Any:
        """Returns the ClassificationResult of serialized examples."""
        outputs = self._on_examples(signature, CLASSIFY, rows)
        result = message("ClassificationResult")()
        for classes in examples.classifications(outputs, len(rows)):
            answer = result.classifications.add()
            for label, score in classes:
                answer.classes.add(label=label, score=score)
        return result

    def _regress_rows(self, signature: Signature, rows: np.ndarray) -> Any:
        """Returns the RegressionResult of serialized examples."""
        outputs = self._on_examples(signature, REGRESS, rows)
        result = message("RegressionResult")()
        for value in examples.regressions(outputs, len(rows)):
            result.regressions.add(value=value)
        return result

    def _on_examples(self, signature: Signature, method: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        examples.check(signature, method, by_name=self._options.check_method_names)
        fetches: Sequence[str] = examples.fetches(signature, method)
        return dict(zip(fetches, self._run(signature, {examples.INPUT: rows}, fetches)))


def _parsed(type_of_message: Any, data: bytes) -> Any:
    try:
        return type_of_message.FromString(data)
    except DecodeError as error:
        raise invalid(f"This is not a valid {type_of_message.DESCRIPTOR.full_name}: {error}") from None
