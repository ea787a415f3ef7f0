"""Converts the REST interface's JSON, in TensorFlow Serving's form, to and from arrays.

Rows ("instances" -> "predictions"): one value per row, which is an object of names if there are several inputs or
outputs. Columns ("inputs" -> "outputs"): one value per name. Bytes are {"b64": "..."}; NaN and Infinity are literals.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from tensorflow.core.example import example_pb2, feature_pb2

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.prediction.servable import DEFAULT_SIGNATURE, Signature
from keras_ddl.serving.prediction.tensors import cast, check_names, check_shape
from keras_ddl.serving.protocol.status import invalid

_ROWS, _COLUMNS = "instances", "inputs"
_BYTES_SUFFIX = "_bytes"  # outputs with such names are bytes, not text
_ROWS_AT_A_TIME = 1000
_FROM_URL = str.maketrans("-_", "+/")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Signatures = Mapping[str, Signature]


@dataclass
class Predict:
    """A predict request: the inputs by alias, and whether they were sent in rows (else columns)."""

    signature: Signature
    inputs: dict[str, np.ndarray]
    in_rows: bool


def parse(body: bytes) -> dict[str, Any]:
    """Parses a request's body. Raises: RequestError: INVALID_ARGUMENT: it is not a JSON object."""
    try:
        value = _loads(body.removeprefix(_BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        raise invalid(f"JSON Parse error: {error}") from None
    if not isinstance(value, dict):
        raise invalid("JSON Value: [...] Type: not an object. The body of a request must be an object.")
    return value


def _loads(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        if b"NaN" in body or b"Infinity" in body:  # not JSON, but TensorFlow Serving accepts them
            return json.loads(body, parse_float=_finite)
        raise
    except SystemError as error:  # orjson ran out of memory
        raise MemoryError from error


def _finite(text: str) -> float:
    """Returns a number that has digits. Raises: ValueError: it is beyond the range of a double, as for orjson."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number is infinity when parsed as double: {text[:50]}")
    return value


def signature_of(request: Mapping[str, Any], signatures: Signatures) -> str:
    """Returns the name of the requested signature. Raises: RequestError: INVALID_ARGUMENT: it does not exist."""
    name = request.get("signature_name", "")
    if not isinstance(name, str):
        raise invalid(f'"signature_name" must be a string. Received: {reprlib.repr(name)}.')
    name = name or DEFAULT_SIGNATURE
    if name not in signatures:
        raise invalid(
            f'Serving signature name: "{name[:100]}" not found in signature def. There are {sorted(signatures)}.'
        )
    return name


def predict_request(body: bytes, signatures: Signatures) -> Predict:
    """Parses a predict request.

    Raises: RequestError: INVALID_ARGUMENT: there are neither rows nor columns, or both; or values do not fit a dtype.
    """
    request = parse(body)
    name = signature_of(request, signatures)
    if (_ROWS in request) == (_COLUMNS in request):
        raise invalid(
            f'A predict request must have either "{_ROWS}" or "{_COLUMNS}". Received: {sorted(request)[:10]}.'
        )
    signature, in_rows = signatures[name], _ROWS in request
    inputs = signature.inputs
    columns = _columns_of_rows(request[_ROWS], name, inputs) if in_rows else _columns(request[_COLUMNS], name, inputs)
    check_names(signature, columns)
    arrays = {alias: _array(alias, value, inputs[alias].dtype) for alias, value in columns.items()}
    for alias, array in arrays.items():
        check_shape(signature, alias, array.shape)
    return Predict(signature, arrays, in_rows)


def examples_request(body: bytes, signatures: Signatures) -> tuple[Signature, list[bytes]]:
    """Parses a classify or regress request. Returns the signature and serialized tf.Examples.

    Raises: RequestError: INVALID_ARGUMENT: there are no examples.
    """
    request = parse(body)
    name, rows = signature_of(request, signatures), request.get("examples")
    if not isinstance(rows, list) or not rows:
        raise invalid(f'The request must have a list of "examples". Received: {sorted(request)[:10]}.')
    context = example_of(request["context"]) if "context" in request else b""
    return signatures[name], [context + example_of(row) for row in rows]


def _columns_of_rows(rows: Any, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise invalid(f'"{_ROWS}" must be a list of at least one row. Received: {reprlib.repr(rows)}.')
    first = rows[0].keys() if isinstance(rows[0], dict) and not _is_bytes(rows[0]) else None
    for row in rows:
        if (row.keys() if isinstance(row, dict) and not _is_bytes(row) else None) != first:
            raise invalid(f'All of "{_ROWS}" must have the same inputs. Received: {list(first or [])[:10]} and others.')
    if first is None:
        return {_only(name, inputs): rows}
    return {alias: [row[alias] for row in rows] for alias in first}


def _columns(value: Any, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(value, dict) and not _is_bytes(value):
        return value
    return {_only(name, inputs): value}


def _only(name: str, inputs: Mapping[str, Any]) -> str:
    if len(inputs) != 1:
        raise invalid(f"Signature {name!r} takes {sorted(inputs)} by name. Received: values without a name.")
    return next(iter(inputs))


def _is_bytes(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["b64"]


def _array(alias: str, value: Any, number: int) -> np.ndarray:
    dtype = tf.as_dtype(number)
    try:
        # As objects first, because with one string among numbers NumPy would convert everything to strings.
        array = np.array(value, dtype=object)
        if any(type(each) is list for each in array.reshape(-1)):
            raise ValueError(_unequal(value))
        if dtype == tf.string:
            array.reshape(-1)[:] = [_bytes_of(each) for each in array.reshape(-1)]
            return array
        wanted = np.dtype(dtype.as_numpy_dtype)
        if wanted.kind not in _KINDS:
            raise invalid(f"Input {alias!r} has dtype {dtype.name}, which JSON cannot express.")
        wrong = set(map(type, array.reshape(-1))) - _KINDS[wanted.kind]
        if wrong:
            first = next(each for each in array.reshape(-1) if type(each) in wrong)
            raise ValueError(f"values are {' and '.join(sorted(map(_described, wrong)))}: {reprlib.repr(first)}")
        return cast(array, dtype)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise invalid(f"Input {alias!r} takes {dtype.name}: {error}.") from None


_NUMBERS = frozenset((int, float))
# Kind of a dtype -> types that its JSON values may have; bfloat16 and similar dtypes have kind V.
_KINDS = {
    "b": frozenset((bool,)),
    "i": frozenset((int,)),
    "u": frozenset((int,)),
    "f": _NUMBERS,
    "c": _NUMBERS,
    "V": _NUMBERS,
}


def _unequal(value: list[Any], place: str = "") -> str:
    """Describes the two rows of nested lists that differ in length or depth."""
    sizes = [len(each) if isinstance(each, list) else None for each in value]
    usual = max(sizes, key=sizes.count)
    other = next((number for number, size in enumerate(sizes) if size != usual), None)
    if other is None:
        deeper = next((n for n, each in enumerate(value) if np.array(each, dtype=object).ndim == 1), 0)
        inner = any(isinstance(leaf, list) for leaf in np.array(value[deeper], dtype=object).reshape(-1))
        return (
            _unequal(value[deeper], f"{place}[{deeper}]" if place else str(deeper))
            if inner
            else "rows have unequal lengths or depths"
        )
    first = sizes.index(usual)
    looks = [
        f"row {f'{place}[{number}]' if place else number} has "
        f"{'no list' if sizes[number] is None else 'length ' + str(sizes[number])}"
        for number in sorted((first, other))
    ]
    return f"all rows must have one length; {looks[0]}, and {looks[1]}"


def _described(kind: type) -> str:
    names: dict[type, str] = {list: "rows of unequal lengths or depths", str: "text", dict: "objects"}
    return names.get(kind, kind.__name__)


def _bytes_of(value: Any) -> bytes:
    """Returns the bytes of a string or of {"b64": ...}. Raises: ValueError: it is neither."""
    if _is_bytes(value) and isinstance(value["b64"], str):
        # Clients also write base64 without padding, on several lines, or with the URL alphabet.
        text = "".join(value["b64"].split()).rstrip("=").translate(_FROM_URL)
        try:
            return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except binascii.Error as error:
            raise ValueError(f"b64: {error}") from None
    if isinstance(value, str):
        return value.encode()
    raise ValueError(f"must be a string or an object with only b64, not {reprlib.repr(value)}")


def example_of(value: Any) -> bytes:
    """Converts an object of numbers, strings, bytes and lists of these to a serialized tf.Example.

    Raises: RequestError: INVALID_ARGUMENT: `value` is anything else.
    """
    if not isinstance(value, dict):
        raise invalid(f"An example must be an object of features. Received: {reprlib.repr(value)}.")
    example = example_pb2.Example()
    for name, each in value.items():
        try:
            example.features.feature[name].CopyFrom(_feature(each if isinstance(each, list) else [each]))
        except (OverflowError, ValueError) as error:
            raise invalid(f"Feature {name[:100]!r}: {error}.") from None
    return example.SerializeToString()


def _feature(values: list[Any]) -> feature_pb2.Feature:
    values = [_bytes_of(each) if isinstance(each, (str, dict)) else each for each in values]
    kinds = set(map(type, values))
    if kinds <= {bytes}:
        return feature_pb2.Feature(bytes_list=feature_pb2.BytesList(value=values))
    if kinds <= {int}:
        return feature_pb2.Feature(int64_list=feature_pb2.Int64List(value=values))
    if kinds <= {int, float}:
        numbers = cast(np.array(values, dtype=object), tf.float32)
        return feature_pb2.Feature(float_list=feature_pb2.FloatList(value=numbers.tolist()))
    raise ValueError(f"must be numbers or strings, all of one kind, not {reprlib.repr(values)}")


def predict_response(names: Sequence[str], arrays: Sequence[np.ndarray], in_rows: bool) -> bytes:
    """Returns the response to a predict request. A single output has no name in it.

    Raises: RequestError: INVALID_ARGUMENT: an output is complex, or does not have one value per row when in rows.
    """
    sizes = {array.shape[:1] for array in arrays}
    if in_rows and (len(sizes) > 1 or sizes == {()}):
        shapes = {name: list(array.shape) for name, array in zip(names, arrays)}
        raise invalid(f'"{_ROWS}" needs outputs with one row for each instance. The model returns {shapes}.')
    arrays = [_with_json_dtype(name, array) for name, array in zip(names, arrays)]
    is_finite = all(array.dtype.kind != "f" or np.isfinite(array).all() for array in arrays)
    columns = [_values(name, array, is_finite) for name, array in zip(names, arrays)]
    # JSON has no NaN and Infinity; Python's json writes them as TensorFlow Serving does.
    write = dumps if is_finite else lambda value: json.dumps(value).encode()
    if in_rows and len(names) > 1:
        return b'{"predictions":[' + b",".join(_written_rows(names, columns, write)) + b"]}"
    if in_rows:
        return write({"predictions": columns[0]})
    return write({"outputs": dict(zip(names, columns)) if len(names) > 1 else columns[0]})


def _written_rows(names: Sequence[str], columns: Sequence[Any], write: Callable[[Any], bytes]) -> Iterator[bytes]:
    """Yields the text of some rows at a time, because a row's Python objects need far more memory than its text."""
    rows = zip(*columns)
    while some := [dict(zip(names, row)) for row in itertools.islice(rows, _ROWS_AT_A_TIME)]:
        yield write(some)[1:-1]


def dumps(value: Any) -> bytes:
    """Returns JSON; finite floats in arrays are written in the shortest form that reads back exactly."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _with_json_dtype(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "c":
        raise invalid(f"JSON has no complex numbers, and output {name!r} is complex.")
    if array.dtype.kind == "V" or array.dtype.name in ("bfloat16", "float16"):
        return array.astype(np.float32)
    return array


def _values(name: str, array: np.ndarray, is_finite: bool) -> Any:
    """Returns a value that orjson can write, or, if not all numbers are finite, json."""
    if array.dtype.kind == "O":
        as_bytes = name.endswith(_BYTES_SUFFIX)
        flat = [{"b64": base64.b64encode(text).decode()} if as_bytes else _text(text) for text in array.reshape(-1)]
        values = np.empty(len(flat), dtype=object)
        values[:] = flat
        return values.reshape(array.shape).tolist()
    if is_finite and array.ndim and array.size:
        return np.ascontiguousarray(array)
    # Goes through strings, so that float32 0.1 stays 0.1.
    return (array.astype(str).astype(np.float64) if array.dtype.kind == "f" else array).tolist()


def _text(value: bytes) -> Any:
    """Returns a string; for bytes that are not UTF-8, {"b64": ...}."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}
