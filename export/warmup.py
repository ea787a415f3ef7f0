"""assets.extra/tf_serving_warmup_requests: requests that TensorFlow Serving runs before a version becomes available.

The file is a TFRecord of tensorflow.serving.PredictionLog. This module encodes its few fields by the definitions of
tensorflow-serving-api 2.21 (apis/prediction_log.proto, predict.proto, model.proto), because that package requires the
full `tensorflow`, which would overwrite tensorflow-cpu.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = "tf_serving_warmup_requests"


def write(path: Path, requests: Iterable[bytes]) -> None:
    """Writes requests made by `request` to a TFRecord file."""
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for each in requests:
            writer.write(each)


def request(model_name: str, signature: str, rows: Mapping[str, Any], inputs: Mapping[str, Any]) -> bytes:
    """Returns a serialized Predict request. Pass `rows` that a replay has run: a failing request fails the load.

    Args:
        rows: input name -> array.
        inputs: input name -> [dtype name, shape], from the manifest.
    """
    import tensorflow as tf

    protos = {}
    for name, array in rows.items():
        tensor = tf.cast(tf.constant(array), tf.as_dtype(inputs[name][0]))
        protos[name] = tf.make_tensor_proto(tensor.numpy(), dtype=tensor.dtype).SerializeToString()
    return prediction_log(model_name, signature, protos)


def read(path: Path) -> dict[str, Any] | None:
    """Returns name -> array of the first Predict request to `serving_default` in the file.

    None: there is no such request or file, or another kind of file, which a server reports when it loads the version.
    """
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        records = list(tf.data.TFRecordDataset(str(path)).take(1000).as_numpy_iterator()) if path.is_file() else []
        return next((rows for record in records if (rows := _rows(record)) is not None), None)
    except (DecodeError, ValueError, tf.errors.OpError):
        return None


def _rows(record: bytes) -> dict[str, Any] | None:
    """Returns the inputs of a PredictionLog, if it is a Predict request to `serving_default`."""
    import tensorflow as tf
    from tensorflow.core.framework import tensor_pb2

    for request in [each for predict in _fields(record, 6) for each in _fields(predict, 1)]:
        spec = b"".join(_fields(request, 1))
        if _fields(spec, 3) not in ([], [b""], [b"serving_default"]):
            continue
        entries = [(_fields(entry, 1), _fields(entry, 2)) for entry in _fields(request, 2)]
        return {name.decode(): tf.make_ndarray(tensor_pb2.TensorProto.FromString(row)) for (name,), (row,) in entries}
    return None


def prediction_log(model_name: str, signature: str, tensors: Mapping[str, bytes]) -> bytes:
    """Returns a serialized PredictionLog{predict_log{request{model_spec, inputs}}}; `tensors` are TensorProtos."""
    spec = _field(1, model_name.encode()) + _field(3, signature.encode())
    entries = b"".join(
        _field(2, _field(1, name.encode()) + _field(2, value)) for name, value in sorted(tensors.items())
    )
    return _field(6, _field(1, _field(1, spec) + entries))


def _field(number: int, payload: bytes) -> bytes:
    """Encodes a length-delimited field of a protocol buffer (wire type 2)."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _fields(message: bytes, number: int) -> list[bytes]:
    """Returns the length-delimited fields with this number, and skips others; [] if `message` is no protocol buffer."""
    payloads, place = [], 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    try:
        while place < len(message):
            tag = varint()
            wire = tag & 7
            size = {1: 8, 5: 4}.get(wire, 0) if wire != 2 else varint()
            if wire == 0:
                varint()
            elif wire == 2 and tag >> 3 == number:
                payloads.append(message[place : place + size])
            place += size
    except IndexError:
        return []
    return payloads


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
