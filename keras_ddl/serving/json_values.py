"""Values of the REST interface: JSON as TensorFlow Serving has it, to and from arrays.

Rows ("instances" -> "predictions"): one value for each row, an object by name where there are several. Columns
("inputs" -> "outputs"): one value for each name. Bytes are {"b64": "..."}; NaN and Infinity are written as such.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.servable import Signature
from keras_ddl.serving.status import Code, RequestError, invalid

_ROWS, _COLUMNS = "instances", "inputs"
_BYTES_SUFFIX = "_bytes"  # outputs with such a name are not text


def parse(body: bytes) -> dict[str, Any]:
    """Returns the object that a request's body is. Raises: RequestError: INVALID_ARGUMENT: it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"JSON Parse error: {error}") from None
    if not isinstance(value, dict):
        raise invalid("JSON Value: [...] Type: not an object. The body of a request is an object.")
    return value


def inputs_of(request: Mapping[str, Any], signature: Signature) -> tuple[dict[str, np.ndarray], bool]:
    """Returns the arrays of a predict request, and whether it has rows (else columns).

    Raises: RequestError: INVALID_ARGUMENT: neither or both, or values that no array of the input's dtype can have.
    """
    if (_ROWS in request) == (_COLUMNS in request):
        raise invalid(f'A predict request has either "{_ROWS}" or "{_COLUMNS}". Received: {sorted(request)}.')
    in_rows = _ROWS in request
    columns = _columns_of_rows(request[_ROWS], signature) if in_rows else _columns(request[_COLUMNS], signature)
    unknown = sorted(set(columns) - set(signature.inputs))
    if unknown:
        raise invalid(f"Signature {signature.name!r} takes {sorted(signature.inputs)}. Received: {unknown}.")
    return {alias: _array(alias, value, signature.inputs[alias].dtype) for alias, value in columns.items()}, in_rows


def _columns_of_rows(rows: Any, signature: Signature) -> dict[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise invalid(f'"{_ROWS}" is a list of at least one row. Received: {str(rows)[:100]}.')
    names = [set(row) if isinstance(row, dict) and not _is_bytes(row) else None for row in rows]
    if any(each != names[0] for each in names):
        raise invalid(f'All of "{_ROWS}" must have the same inputs. Received: {names[0]} and others.')
    if names[0] is None:
        return {_only(signature.inputs, signature): rows}
    return {name: [row[name] for row in rows] for name in names[0]}


def _columns(value: Any, signature: Signature) -> dict[str, Any]:
    if isinstance(value, dict) and not _is_bytes(value):
        return value
    return {_only(signature.inputs, signature): value}


def _only(names: Mapping[str, Any], signature: Signature) -> str:
    if len(names) != 1:
        raise invalid(
            f"Signature {signature.name!r} takes {sorted(names)}: name each. Received: values without a name."
        )
    return next(iter(names))


def _is_bytes(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["b64"]


def _array(alias: str, value: Any, dtype_number: int) -> np.ndarray:
    dtype = tf.as_dtype(dtype_number)
    try:
        if dtype == tf.string:
            return _array_of_bytes(value)
        found = np.array(value)
        if found.dtype == object:
            raise ValueError("rows of unequal lengths, or values that are not numbers")
        kinds = (
            {"b": "b"} if dtype.is_bool else {"i": "iu", "u": "iu"} if dtype.is_integer else {"f": "iuf", "c": "iufc"}
        )
        wanted = np.dtype(dtype.as_numpy_dtype)
        if found.size and found.dtype.kind not in kinds.get("c" if dtype.is_complex else wanted.kind, "iuf"):
            raise ValueError(f"values are of kind {found.dtype.name}")
        cast = found.astype(wanted)
        if dtype.is_integer and found.size and not np.array_equal(cast, found):
            raise ValueError(f"a value is out of the range of {dtype.name}")
        return cast
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise invalid(f"Input {alias!r} takes {dtype.name}: {error}.") from None


def _array_of_bytes(value: Any) -> np.ndarray:
    shape: list[int] = []
    level = value
    while isinstance(level, list):
        shape.append(len(level))
        level = level[0] if level else None
    flat: list[bytes] = []

    def walk(each: Any, depth: int) -> None:
        if depth < len(shape):
            if not isinstance(each, list) or len(each) != shape[depth]:
                raise ValueError("rows of unequal lengths")
            for inner in each:
                walk(inner, depth + 1)
        else:
            flat.append(bytes_of(each))

    walk(value, 0)
    found = np.empty(len(flat), dtype=object)
    found[:] = flat
    return found.reshape(shape)


def bytes_of(value: Any) -> bytes:
    """Returns a string, or what {"b64": ...} encodes. Raises: ValueError: it is neither."""
    if _is_bytes(value) and isinstance(value["b64"], str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"b64: {error}") from None
    if isinstance(value, str):
        return value.encode()
    raise ValueError(f"must be a string or an object with only b64, not {str(value)[:100]}")


def features_of(value: Any) -> dict[str, Any]:
    """Returns the features of an example, with bytes for {"b64": ...}. Raises: RequestError: it is no object."""
    if not isinstance(value, dict):
        raise invalid(f"An example must be an object of features. Received: {str(value)[:100]}.")
    try:
        return {name: _feature(each) for name, each in value.items()}
    except ValueError as error:
        raise invalid(f"A feature: {error}.") from None


def _feature(value: Any) -> Any:
    if isinstance(value, list):
        return [bytes_of(each) if isinstance(each, dict) else each for each in value]
    return bytes_of(value) if isinstance(value, dict) else value


def answer_of(names: Sequence[str], arrays: Sequence[np.ndarray], in_rows: bool) -> dict[str, Any]:
    """Returns the answer to a predict request: one output alone stands without its name.

    Raises: RequestError: FAILED_PRECONDITION: rows are asked for, and an output has not one value for each.
    """
    if not in_rows:
        values = {name: _listed(name, array) for name, array in zip(names, arrays)}
        return {"outputs": values[names[0]] if len(names) == 1 else values}
    sizes = {array.shape[:1] for array in arrays}
    if len(sizes) > 1 or sizes == {()}:
        shapes = {name: list(array.shape) for name, array in zip(names, arrays)}
        raise RequestError(
            Code.FAILED_PRECONDITION,
            f'"{_ROWS}" needs outputs with one row for each instance. The model returns {shapes}.',
        )
    columns = [_listed(name, array) for name, array in zip(names, arrays)]
    if len(names) == 1:
        return {"predictions": columns[0]}
    return {"predictions": [dict(zip(names, row)) for row in zip(*columns)]}


def _listed(name: str, array: np.ndarray) -> Any:
    if array.dtype.kind == "O":
        as_bytes = name.endswith(_BYTES_SUFFIX)
        flat = [{"b64": base64.b64encode(text).decode()} if as_bytes else _text(text) for text in array.reshape(-1)]
        found = np.empty(len(flat), dtype=object)
        found[:] = flat
        return found.reshape(array.shape).tolist()
    if array.dtype.kind == "V" or array.dtype.name in ("bfloat16", "float16"):
        array = array.astype(np.float32)
    if array.dtype.kind == "c":
        raise RequestError(Code.UNIMPLEMENTED, f"JSON has no complex numbers, and output {name!r} is complex.")
    return array.tolist()


def _text(value: bytes) -> Any:
    """Returns text as such; bytes that are no text as {"b64": ...}, which loses nothing."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}
