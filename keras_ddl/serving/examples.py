"""Classify and Regress: signatures over serialized tf.Example, and what their answers must look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.servable import CLASSIFY, REGRESS, Signature
from keras_ddl.serving.status import Code, RequestError, invalid

INPUT = "inputs"
CLASSES, SCORES, OUTPUTS = "classes", "scores", "outputs"


def check_method(signature: Signature, method: str) -> None:
    """Raises: RequestError: INVALID_ARGUMENT: the signature was not made for that."""
    if signature.method != method:
        raise invalid(
            f"Expected {method.rpartition('/')[2]} signature method_name to be {method}. Was: {signature.method}, of "
            f"signature {signature.name!r}."
        )
    if list(signature.inputs) != [INPUT]:
        raise invalid(f"Signature {signature.name!r} takes {sorted(signature.inputs)}, not {INPUT!r} alone.")


def serialized(input_proto: Any) -> np.ndarray:
    """Returns the examples of an Input, each with the features of its context, as the model parses them.

    Raises: RequestError: INVALID_ARGUMENT: there is none.
    """
    kind = input_proto.WhichOneof("kind")
    if kind == "example_list":
        examples = [example.SerializeToString() for example in input_proto.example_list.examples]
    elif kind == "example_list_with_context":
        both = input_proto.example_list_with_context
        # What stands in a message twice counts as it stands there last; serialized messages merge by concatenation.
        context = both.context.SerializeToString()
        examples = [context + example.SerializeToString() for example in both.examples]
    else:
        examples = []
    if not examples:
        raise invalid("Input is empty: it has no tf.Example.")
    return np.array(examples, dtype=object)


def fetches(signature: Signature) -> list[str]:
    """Returns the outputs that an answer is made of."""
    names = (CLASSES, SCORES) if signature.method == CLASSIFY else (OUTPUTS,)
    found = [name for name in names if name in signature.outputs]
    if not found:
        raise RequestError(
            Code.FAILED_PRECONDITION,
            f"Signature {signature.name!r} needs an output {' or '.join(names)}. It has {sorted(signature.outputs)}.",
        )
    return found


def classifications(outputs: Mapping[str, np.ndarray], count: int) -> list[list[tuple[str, float]]]:
    """Returns (label, score) of every class, for each of `count` examples. Missing labels are "", missing scores 0.

    Raises: RequestError: FAILED_PRECONDITION: the model answers other shapes than [count, n].
    """
    classes, scores = outputs.get(CLASSES), outputs.get(SCORES)
    shapes = {array.shape for array in (classes, scores) if array is not None}
    shape = next(iter(shapes))
    if len(shapes) > 1 or len(shape) != 2 or shape[0] != count:
        raise RequestError(
            Code.FAILED_PRECONDITION, f"classes and scores must be [{count}, n]. The model answered {sorted(shapes)}."
        )
    labels = (
        np.full(shape, "") if classes is None else [[text.decode(errors="replace") for text in row] for row in classes]
    )
    values = np.zeros(shape) if scores is None else scores
    return [[(str(label), float(value)) for label, value in zip(*pair)] for pair in zip(labels, values)]


def regressions(outputs: Mapping[str, np.ndarray], count: int) -> list[float]:
    """Returns the value of each of `count` examples. Raises: RequestError: FAILED_PRECONDITION: other shapes."""
    values = outputs[OUTPUTS]
    if values.shape not in ((count,), (count, 1)):
        raise RequestError(
            Code.FAILED_PRECONDITION, f"outputs must be [{count}] or [{count}, 1]. The model answered {values.shape}."
        )
    return [float(value) for value in values.reshape(-1)]


def of_features(features: Mapping[str, Any]) -> Any:
    """Returns a tf.Example of JSON values: numbers, strings, {"b64": ...} decoded to bytes, and lists of these.

    Raises: RequestError: INVALID_ARGUMENT: a feature of anything else.
    """
    example = tf.train.Example()
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        feature = example.features.feature[name]
        if all(isinstance(each, (str, bytes)) for each in values):
            feature.bytes_list.value.extend(each if isinstance(each, bytes) else each.encode() for each in values)
        elif all(isinstance(each, int) and not isinstance(each, bool) for each in values):
            _extend(name, feature.int64_list.value, values)
        elif all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values):
            _extend(name, feature.float_list.value, values)
        else:
            raise invalid(
                f"Feature {name!r} must be numbers or strings, all of one kind. Received: {str(value)[:100]}."
            )
    return example


def _extend(name: str, into: Any, values: Sequence[Any]) -> None:
    try:
        into.extend(values)
    except (ValueError, OverflowError) as error:
        raise invalid(f"Feature {name!r}: {error}") from None


METHODS = {"classify": CLASSIFY, "regress": REGRESS}
