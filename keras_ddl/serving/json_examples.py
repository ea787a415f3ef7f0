"""tf.Example of JSON values, as its serialized message; without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_ddl.serving import wire
from keras_ddl.serving.status import invalid

# Of tf.train.Feature: bytes_list, float_list, int64_list.
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


def example_of(features: Mapping[str, Any]) -> bytes:
    """Returns a serialized tf.Example of numbers, strings, bytes, and lists of these.

    Raises: RequestError: INVALID_ARGUMENT: a feature of anything else.
    """
    entries = []
    try:
        for name, value in features.items():
            feature = _feature(name, value if isinstance(value, list) else [value])
            entries.append(_message(1, _message(1, name.encode()) + _message(2, feature)))
    except UnicodeEncodeError as error:
        raise invalid(f"A text is not Unicode: {error}.") from None
    return _message(1, b"".join(entries))


def _feature(name: str, values: Sequence[Any]) -> bytes:
    kinds = {type(each) for each in values}
    if kinds <= {str, bytes}:
        texts = (each if isinstance(each, bytes) else each.encode() for each in values)
        return _message(_BYTES_LIST, b"".join(_message(1, each) for each in texts))
    if kinds <= {int}:
        return _message(_INT64_LIST, _message(1, _checked(name, values, _varints)))
    if kinds <= {int, float}:
        return _message(_FLOAT_LIST, _message(1, _checked(name, values, _floats)))
    raise invalid(f"Feature {name!r} must be numbers or strings, all of one kind. Received: {str(values)[:100]}.")


def _checked(name: str, values: Sequence[Any], pack: Callable[[Sequence[Any]], bytes]) -> bytes:
    try:
        return pack(values)
    except OverflowError as error:
        raise invalid(f"Feature {name!r}: {error}.") from None


def _varints(values: Sequence[int]) -> bytes:
    return b"".join(map(wire.varint, np.array(values, np.int64).view(np.uint64).tolist()))


def _floats(values: Sequence[float]) -> bytes:
    return np.array(values, "<f4").tobytes()


def _message(number: int, value: bytes) -> bytes:
    return wire.encoded(number, wire.BYTES, value)
