"""Classify and Regress: checks signatures over serialized tf.Example, and converts their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_ddl.serving.prediction.servable import CLASSIFY, Signature
from keras_ddl.serving.protocol.status import Code, RequestError, invalid

INPUT = "inputs"
CLASSES, SCORES, OUTPUTS = "classes", "scores", "outputs"


def check(signature: Signature, method: str, *, by_name: bool) -> None:
    """Checks that a signature takes examples.

    Args:
        by_name: also check that its method name is `method`; tf.saved_model.save writes "predict" for all signatures.
    Raises: RequestError: INVALID_ARGUMENT: the signature does not.
    """
    if by_name and signature.method != method:
        raise invalid(
            f"Expected {method.rpartition('/')[2]} signature method_name to be {method}. Was: {signature.method}, of "
            f"signature {signature.name!r}."
        )
    if list(signature.inputs) != [INPUT]:
        raise invalid(f"Signature {signature.name!r} takes {sorted(signature.inputs)}, not {INPUT!r} alone.")


def fetches(signature: Signature, method: str) -> list[str]:
    """Returns the outputs that a response needs."""
    names = (CLASSES, SCORES) if method == CLASSIFY else (OUTPUTS,)
    present = [name for name in names if name in signature.outputs]
    if not present:
        raise RequestError(
            Code.FAILED_PRECONDITION,
            f"Signature {signature.name!r} needs an output {' or '.join(names)}. It has {sorted(signature.outputs)}.",
        )
    return present


def classifications(outputs: Mapping[str, np.ndarray], count: int) -> list[list[tuple[str, float]]]:
    """Returns (label, score) of every class, for each of `count` examples. Missing labels are "", missing scores 0.

    Raises: RequestError: FAILED_PRECONDITION: an output has another shape than [count, n].
    """
    classes, scores = outputs.get(CLASSES), outputs.get(SCORES)
    shapes = {array.shape for array in (classes, scores) if array is not None}
    shape = next(iter(shapes))
    if len(shapes) > 1 or len(shape) != 2 or shape[0] != count:
        raise RequestError(
            Code.FAILED_PRECONDITION, f"classes and scores must be [{count}, n]. The model answered {sorted(shapes)}."
        )
    if classes is not None and classes.dtype.kind not in "OS":
        raise RequestError(Code.FAILED_PRECONDITION, f"classes must be strings. The model answered {classes.dtype}.")
    if classes is None:
        labels = [[""] * shape[1]] * count
    else:
        labels = [[text.decode(errors="replace") for text in row] for row in classes]
    values = np.zeros(shape) if scores is None else scores
    return [
        [(label, float(value)) for label, value in zip(row_labels, values_of_row)]
        for row_labels, values_of_row in zip(labels, values)
    ]


def regressions(outputs: Mapping[str, np.ndarray], count: int) -> list[float]:
    """Returns the value of each of `count` examples. Raises: RequestError: FAILED_PRECONDITION: wrong shape."""
    values = outputs[OUTPUTS]
    if values.shape not in ((count,), (count, 1)):
        raise RequestError(
            Code.FAILED_PRECONDITION, f"outputs must be [{count}] or [{count}, 1]. The model answered {values.shape}."
        )
    return [float(value) for value in values.reshape(-1)]


def rows_of(message: Any) -> np.ndarray:
    """Returns the serialized examples of an Input, each merged with the context.

    Raises: RequestError: INVALID_ARGUMENT: there are no examples.
    """
    kind = message.WhichOneof("kind")
    rows = getattr(message, kind).examples if kind else ()
    if not rows:
        raise invalid("Input is empty: it has no tf.Example.")
    context = message.example_list_with_context.context.SerializeToString()
    examples = np.empty(len(rows), dtype=object)
    # Concatenating serialized messages merges them; the later value of a field counts.
    examples[:] = [context + row.SerializeToString() for row in rows]
    return examples
