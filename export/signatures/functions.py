"""Signatures that are functions: of the model's inputs, or, as `Function`, of inputs of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_ddl.errors import ExportError

if TYPE_CHECKING:
    from keras_ddl.export.tracing.inputs import Inputs


@dataclass(frozen=True)
class Function:
    """A signature with inputs of its own, whatever the model takes: text to be cut into ids, raw bytes, a key.

    Args:
        call: called with the inputs by their names; answers tensors. Variables that it reads are the model's. Tables
            and other resources are found if it is a tf.Module or a method of one. A layer or model is called with
            `training=False`.
        sample: input name -> a few rows, which every export asks and compares, as `sample` of the model.
        input_signature: input name -> tf.TensorSpec; None: as the sample is, with any number of rows.
    """

    call: Callable[..., Any]
    sample: Mapping[str, Any]
    input_signature: Mapping[str, Any] | None = None

    def inputs(self) -> Inputs:
        """Returns what it takes. Raises: ExportError: no names of inputs."""
        from keras_ddl.export.tracing.inputs import as_inputs, spec_of_sample

        both = [each for each in (self.sample, self.input_signature) if each is not None]
        names = [set(each) if isinstance(each, Mapping) else set() for each in both]
        if not all(names) or any(each != names[0] for each in names) or not all(map(_is_identifier, names[0])):
            raise ExportError(
                "Function takes sample= with rows by the name of the input, and input_signature= with a tf.TensorSpec "
                f"for each of these, if any. Received: sample of {type(self.sample).__name__} with "
                f"{sorted(map(str, names[0]))}, input_signature with {sorted(map(str, names[-1]))}. Say "
                "Function(call, sample={'text': ['a phrase']}), for example."
            )
        if self.input_signature is not None:
            return as_inputs(dict(self.input_signature))
        return as_inputs({name: spec_of_sample(rows) for name, rows in self.sample.items()})


def plain(function: Any, inputs: Inputs) -> Callable[..., Any]:
    """Returns a signature's function as one of tensors by name. Layers and models do not train.

    Args:
        inputs: those of the model, or of the `Function`.
    """
    import keras

    call = function.call if isinstance(function, Function) else function
    is_layer = isinstance(call, keras.layers.Layer)
    parameters = {} if is_layer else inspect.signature(call).parameters
    options = {"training": False} if is_layer or "training" in parameters else {}

    def run(**tensors: Any) -> Any:
        if isinstance(function, Function):
            return call(**inputs.assemble(tensors), **options)
        return call(inputs.pack(tensors), **options)

    return run


def modules(functions: Iterable[Any]) -> list[Any]:
    """Returns the tf.Modules whose methods signatures' functions are, or which they are: they may hold tables."""
    import tensorflow as tf

    calls = [each.call if isinstance(each, Function) else each for each in functions]
    owners = [getattr(inspect.unwrap(each), "__self__", each) for each in calls]
    # Of a method under tf.function TensorFlow keeps the object behind one of its own.
    owners = [getattr(each, "target", each) for each in owners]
    return [each for each in owners if isinstance(each, tf.Module)]


def _is_identifier(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("_")
