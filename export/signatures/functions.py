"""Supports signatures that are functions of the model's inputs or (`Function`) of their own inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export.inference.inputs import Inputs, as_inputs, spec_of_sample


@dataclass(frozen=True)
class Function:
    """A signature with its own inputs instead of the model's: text to tokenize, raw bytes, a key.

    Args:
        call: a function of the inputs by name that returns tensors. It may read the model's variables. Its tables and
            other resources are exported if it is a tf.Module or a method of one. A layer or model is called with
            `training=False`.
        sample: input name -> a few rows, on which every export compares the outputs.
        input_signature: input name -> tf.TensorSpec; None: specs of the sample, with any number of rows.
    """

    call: Callable[..., Any]
    sample: Mapping[str, Any]
    input_signature: Mapping[str, Any] | None = None

    def inputs(self) -> Inputs:
        """Returns the inputs. Raises: ExportError: inputs have no names, or `sample` and `input_signature` differ."""
        both = [each for each in (self.sample, self.input_signature) if each is not None]
        names = [set(each) if isinstance(each, Mapping) else set() for each in both]
        if not all(names) or any(each != names[0] for each in names) or not all(map(_is_identifier, names[0])):
            raise ExportError(
                "Function needs sample= with rows for each input, by name. If input_signature= is given, it must have "
                f"a tf.TensorSpec for each of the same names. Received: sample of {type(self.sample).__name__} with "
                f"{sorted(map(str, names[0]))}, input_signature with {sorted(map(str, names[-1]))}. For example: "
                "Function(call, sample={'text': ['a phrase']})."
            )
        if self.input_signature is not None:
            return as_inputs(dict(self.input_signature))
        return as_inputs({name: spec_of_sample(rows) for name, rows in self.sample.items()})


def plain(function: Any, inputs: Inputs) -> Callable[..., Any]:
    """Wraps a signature's function so that it takes tensors by name. Layers and models run with training=False.

    Args:
        inputs: the inputs of the model or of the `Function`.
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
    """Returns the tf.Modules among the functions, and the owners of methods among them: both may have tables."""
    import tensorflow as tf

    calls = [each.call if isinstance(each, Function) else each for each in functions]
    owners = [getattr(inspect.unwrap(each), "__self__", each) for each in calls]
    # tf.function wraps the owner of a method in an object with the attribute `target`.
    owners = [getattr(each, "target", each) for each in owners]
    return [each for each in owners if isinstance(each, tf.Module)]


def _is_identifier(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("_")
