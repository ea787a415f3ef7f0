"""Records the outputs of a model's layers, which signatures may also return."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from keras_ddl.export.inference.isolation import layers_of


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[dict[str, Any]]:
    """Records the outputs of layers inside `model` within the block: layer name -> tensor, filled when the block ends.

    The model itself is left out, and so is a layer that is called more than once, shares its name with another layer,
    or does not return one dense tensor.
    """
    import tensorflow as tf

    answers: dict[str, list[Any]] = {}
    outputs: dict[str, Any] = {}
    watched = [layer for layer in layers_of(model) if layer is not model and "call" not in vars(layer)]
    try:
        for layer in watched:
            # object.__setattr__ bypasses Keras's tracking.
            object.__setattr__(layer, "call", _recording(layer.call, answers.setdefault(layer.name, [])))
        yield outputs
    finally:
        for layer in watched:
            if "call" in vars(layer):
                object.__delattr__(layer, "call")
    outputs.update(
        {name: each[0] for name, each in answers.items() if len(each) == 1 and isinstance(each[0], tf.Tensor)}
    )


def _recording(call: Callable[..., Any], answers: list[Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def recording_call(*args: Any, **kwargs: Any) -> Any:
        answer = call(*args, **kwargs)
        answers.append(answer)
        return answer

    return recording_call


def place_of(tensor: Any, graph: Any) -> str | None:
    """Returns the name of a tensor in the body of a function ("node:output:0").

    Returns None if the tensor is an argument of the function, or belongs to another graph.
    """
    if tensor.graph is not graph or tensor.op.type == "Placeholder":
        return None
    index = tensor.value_index
    for output in tensor.op.op_def.output_arg:
        if output.number_attr:
            count = tensor.op.get_attr(output.number_attr)
        else:
            count = len(tensor.op.get_attr(output.type_list_attr)) if output.type_list_attr else 1
        if index < count:
            return f"{tensor.op.name}:{output.name}:{index}"
        index -= count
    return None
