"""assets.extra/tf_serving_warmup_requests: requests that TensorFlow Serving answers before it calls a version ready.

The file is a TFRecord of tensorflow.serving.PredictionLog. Its few fields are encoded here, from the definitions of
tensorflow-serving-api 2.21 (apis/prediction_log.proto, predict.proto, model.proto), because that package requires the
full `tensorflow`, which would overwrite tensorflow-cpu.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "tf_serving_warmup_requests"


def write(
    path: Path, rows: Mapping[str, Any], inputs: Mapping[str, Any], model_name: str, signature: str = "serving_default"
) -> None:
    """Writes one Predict request. An error in it would fail the server's load, so `rows` are what a replay proved.

    Args:
        rows: input name -> array.
        inputs: input name -> [dtype name, shape], from the manifest.
    """
    import tensorflow as tf

    protos = {}
    for name, array in rows.items():
        tensor = tf.cast(tf.constant(array), tf.as_dtype(inputs[name][0]))
        protos[name] = tf.make_tensor_proto(tensor.numpy(), dtype=tensor.dtype).SerializeToString()
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(prediction_log(model_name, signature, protos))


def prediction_log(model_name: str, signature: str, tensors: Mapping[str, bytes]) -> bytes:
    """Returns a serialized PredictionLog{predict_log{request{model_spec, inputs}}}; `tensors` are TensorProtos."""
    spec = _field(1, model_name.encode()) + _field(3, signature.encode())
    entries = b"".join(
        _field(2, _field(1, name.encode()) + _field(2, value)) for name, value in sorted(tensors.items())
    )
    return _field(6, _field(1, _field(1, spec) + entries))


def _field(number: int, payload: bytes) -> bytes:
    """One length-delimited field of a protocol buffer (wire type 2)."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
