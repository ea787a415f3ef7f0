"""Requests of PredictionService as they arrive, read without unpacking their tensors and examples; and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from keras_ddl.serving import tensors, wire
from keras_ddl.serving.limits import Unpacked
from keras_ddl.serving.servable import Signature
from keras_ddl.serving.status import invalid
from keras_ddl.serving.tensors import Tensor

# Of what a request holds beside tensors and examples: names, versions, filters.
REST_BYTES = 64 * 1024
# predict_pb2.PredictRequest.inputs, and ...Request.input of the other methods.
_INPUTS, _INPUT = 2, 2
_EXAMPLE_LIST, _WITH_CONTEXT = 1, 2  # the kinds of an input_pb2.Input
_EXAMPLES, _CONTEXT = 1, 2  # of either kind


@dataclass
class Predict:
    """A PredictRequest. `inputs`: by alias, not unpacked."""

    spec: Any
    inputs: dict[str, Tensor]
    output_filter: Sequence[str]


def predict_request(data: bytes, unpacked: Unpacked) -> Predict:
    """Reads a PredictRequest. Raises: RequestError: INVALID_ARGUMENT: it is malformed."""
    from tensorflow_serving.apis import predict_pb2

    message, entries = _parsed(predict_pb2.PredictRequest, memoryview(data), _INPUTS, unpacked)
    inputs = {}
    for entry in entries:
        alias, value = _entry(entry)
        inputs[alias] = tensors.tensor_of(alias[:100], value, unpacked)
    return Predict(message.model_spec, inputs, message.output_filter)


def arrays_of(request: Predict, signature: Signature, unpacked: Unpacked) -> dict[str, np.ndarray]:
    """Returns an array for each input of a signature, in its order: checked first, then unpacked.

    Raises: RequestError: INVALID_ARGUMENT: the inputs are not those of the signature; RESOURCE_EXHAUSTED.
    """
    tensors.check(signature, {alias: tensor.dtype for alias, tensor in request.inputs.items()})
    arrays = {alias: tensors.array_of(alias, tensor, unpacked) for alias, tensor in request.inputs.items()}
    return tensors.with_defaults(signature, arrays)


def examples_request(data: bytes, type_of_request: Any, unpacked: Unpacked) -> tuple[Any, np.ndarray]:
    """Returns a request without its input, and the examples of that, serialized.

    Args:
        type_of_request: ClassificationRequest, RegressionRequest or MultiInferenceRequest.
    Raises: RequestError: INVALID_ARGUMENT: it is malformed, or there is no example.
    """
    message, inputs = _parsed(type_of_request, memoryview(data), _INPUT, unpacked)
    kind, examples, context = 0, [], b""
    for given in inputs:
        for number, wire_type, value in wire.fields(given):
            if wire_type != wire.BYTES or number not in (_EXAMPLE_LIST, _WITH_CONTEXT):
                continue
            if number != kind:  # of a oneof the last counts
                kind, examples, context = number, [], b""
            for inner, inner_type, piece in wire.fields(value):
                if inner_type != wire.BYTES:
                    continue
                if inner == _EXAMPLES:
                    unpacked.add_field()
                    examples.append(piece)
                elif inner == _CONTEXT and kind == _WITH_CONTEXT:
                    context += bytes(piece)
    if not examples:
        raise invalid("Input is empty: it has no tf.Example.")
    for each in examples:
        unpacked.add_string(len(context) + len(each))
    # What stands in a message twice counts as it stands there last; serialized messages merge by concatenation.
    found = np.empty(len(examples), dtype=object)
    found[:] = [b"".join((context, each)) for each in examples]
    return message, found


def predict_response(spec: Any, outputs: Iterable[tuple[str, np.ndarray]], *, as_content: bool) -> bytes:
    """Returns a PredictResponse. `as_content`: see `tensors.field_of`."""
    parts: list[bytes | memoryview] = [wire.encoded(2, wire.BYTES, spec.SerializeToString())]
    for alias, array in outputs:
        key, value = wire.encoded(1, wire.BYTES, alias.encode()), tensors.field_of(2, array, as_content=as_content)
        size = len(key) + sum(map(len, value))
        parts += [wire.varint(1 << 3 | wire.BYTES), wire.varint(size), key, *value]
    return b"".join(parts)


def _parsed(type_of_message: Any, data: memoryview, large: int, unpacked: Unpacked) -> tuple[Any, list[memoryview]]:
    """Returns the message without its field `large`, and the contents of that, as often as it stands there."""

    def take(number: int, kind: int) -> bool:
        return number == large and kind == wire.BYTES

    rest, taken = wire.split(data, take, REST_BYTES, unpacked.add_field)
    try:
        return type_of_message.FromString(rest), [value for _, _, value in taken]
    except DecodeError as error:
        raise invalid(f"This is not a valid {type_of_message.DESCRIPTOR.full_name}: {error}") from None


def _entry(entry: memoryview) -> tuple[str, memoryview]:
    """Returns key and value of an entry of a map from strings to messages."""
    key, values = b"", []
    for number, kind, value in wire.fields(entry):
        if kind == wire.BYTES and number == 1:
            key = bytes(value[: REST_BYTES + 1])
        elif kind == wire.BYTES and number == 2:
            values.append(value)
    if len(key) > REST_BYTES:
        raise invalid(f"The name of an input has more than {REST_BYTES} bytes.")
    try:
        alias = key.decode()
    except UnicodeDecodeError:
        raise invalid("The name of an input is not UTF-8.") from None
    return alias, values[0] if len(values) == 1 else memoryview(b"".join(values))
