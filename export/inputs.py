"""Which tensors a model takes: the names, dtypes and shapes of the serving signature, and sample rows that fit them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_ddl.errors import ExportError

_RECORDED = "_keras_ddl_inputs"
_AUTOMATIC = re.compile(r"|(keras_tensor|input_layer|input)(_\d+)?")
_MADE_UP_ROWS = 2
_MADE_UP_LENGTH = 8  # of dimensions that are open beyond the batch


@dataclass(frozen=True)
class Inputs:
    """`structure`: what the model is called with, names in place of tensors; `specs`: name -> tf.TensorSpec."""

    structure: Any
    specs: dict[str, Any]

    def pack(self, tensors: Mapping[str, Any]) -> Any:
        """Returns the tensors in the structure that the model takes."""
        from keras import tree

        return tree.map_structure(lambda name: tensors[name], self.structure)

    def flatten(self, sample: Any) -> dict[str, Any]:
        """Returns name -> array of rows given in the model's structure (or as name -> array).

        Raises: ExportError: another structure, or an array that no input takes.
        """
        import numpy as np
        from keras import tree

        if isinstance(sample, Mapping) and set(sample) == set(self.specs):
            pairs = list(sample.items())
        elif isinstance(self.structure, str) and not isinstance(sample, Mapping):
            pairs = [(self.structure, sample)]
        else:
            try:
                # As in fit, a list may stand for a tuple.
                tree.assert_same_structure(tree.lists_to_tuples(self.structure), tree.lists_to_tuples(sample))
            except (ValueError, TypeError):
                raise ExportError(
                    f"sample has the structure that the model takes. Received: {type(sample).__name__}; "
                    f"the model takes {self.structure!r}."
                ) from None
            pairs = list(zip(tree.flatten(self.structure), tree.flatten(sample)))
        arrays = {}
        for name, value in pairs:
            spec = self.specs[name]
            array = np.asarray(value)
            array = array.astype("S") if spec.dtype.name == "string" else array.astype(spec.dtype.as_numpy_dtype)
            if not spec.shape.is_compatible_with(array.shape):
                raise ExportError(
                    f"sample rows have the shape that input {name!r} takes, {spec.shape}. Received: {array.shape}."
                )
            arrays[name] = array
        return arrays

    def made_up_sample(self) -> dict[str, Any]:
        """Returns name -> array of a few rows: floats in [0, 1), whole numbers 0 or 1, short strings; always equal."""
        import numpy as np

        random = np.random.default_rng(7)
        arrays = {}
        for name, spec in self.specs.items():
            shape = [size or (_MADE_UP_LENGTH if i else _MADE_UP_ROWS) for i, size in enumerate(spec.shape.as_list())]
            if spec.dtype.is_floating:
                arrays[name] = random.random(shape).astype(spec.dtype.as_numpy_dtype)
            elif spec.dtype.name == "string":
                arrays[name] = random.choice(np.array([b"a", b"keras"]), shape)
            else:
                arrays[name] = random.integers(0, 2, shape).astype(spec.dtype.as_numpy_dtype)
        return arrays


def inputs_are_known(model: Any) -> bool:
    """Whether `write_base_graph` can trace `model` now, without input_signature= or sample=.

    True for Functional and built Sequential models, and after `record_inputs` has seen the first call.
    """
    return _symbolic_inputs(model) is not None or getattr(model, _RECORDED, None) is not None


def record_inputs(model: Any) -> None:
    """Notes dtypes and shapes of a subclassed model's next call (Keras keeps only shapes).

    Call it in on_train_begin; after the first train batch `inputs_are_known(model)` is True.
    """
    if inputs_are_known(model) or "call" in vars(model):
        return
    call = model.call

    def recording_call(*args: Any, **kwargs: Any) -> Any:
        from keras import tree

        given = args[0] if args else next(iter(kwargs.values()))
        # object.__setattr__, past Keras's tracking: neither is a layer or a weight.
        object.__setattr__(model, _RECORDED, tree.map_structure(_spec_of, given))
        object.__delattr__(model, "call")
        return call(*args, **kwargs)

    object.__setattr__(model, "call", recording_call)


def find_inputs(model: Any, input_signature: Any = None, sample: Any = None) -> Inputs:
    """Returns what the serving signature takes: from `input_signature`, the model, its first call, or `sample`.

    The first dimension of each is left open. Raises: ExportError: none of these tells, or an input is not dense.
    """
    import tensorflow as tf
    from keras import tree

    symbolic = _symbolic_inputs(model)
    if input_signature is not None:
        given = input_signature
    elif symbolic is not None:
        given = symbolic
    else:
        given = getattr(model, _RECORDED, None)
        if given is None and sample is not None:
            given = tree.map_structure(_spec_of_sample, sample)
    if given is None:
        raise ExportError(
            f"A serving signature needs the dtypes of the model's inputs. Received: {type(model).__name__} "
            f"{model.name!r}, a subclassed model that was not called yet. Give sample= or input_signature="
            f"tf.TensorSpec(...), in the structure that call() takes."
        )
    first = next(iter(inspect.signature(model.call).parameters), "inputs")
    specs: dict[str, Any] = {}
    for path, leaf in tree.flatten_with_path(given):
        spec = _spec_of(leaf)
        if path and all(isinstance(part, str) for part in path):
            name = "_".join(path)
        else:
            name = getattr(leaf, "name", None) or ""
            # Keras numbers unnamed inputs by how many the process has made: no name for a client to rely on.
            name = "_".join([first, *map(str, path)]) if _AUTOMATIC.fullmatch(name) else name
        name = _unique(_identifier(name), specs)
        shape = [None, *spec.shape.as_list()[1:]] if spec.shape.rank else spec.shape
        specs[name] = tf.TensorSpec(shape, spec.dtype, name=name)
    return Inputs(tree.pack_sequence_as(given, list(specs)), specs)


def _symbolic_inputs(model: Any) -> Any:
    """The structure of KerasTensors that a Functional or Sequential model was made of, else None."""
    import keras

    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    return inputs[0] if isinstance(model, keras.Sequential) else model.input


def _spec_of(tensor: Any) -> Any:
    import keras
    import tensorflow as tf

    if (
        getattr(tensor, "sparse", False)
        or getattr(tensor, "ragged", False)
        or isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor, tf.SparseTensorSpec, tf.RaggedTensorSpec))
    ):
        raise ExportError(
            f"A serving signature takes dense tensors. Received: {tensor}. Take a dense tensor (padded, with a mask) "
            f"and convert it inside the model."
        )
    dtype = tensor.dtype if isinstance(tensor, tf.TensorSpec) else keras.backend.standardize_dtype(tensor.dtype)
    return tf.TensorSpec(tensor.shape, dtype)


def _spec_of_sample(value: Any) -> Any:
    import keras
    import numpy as np
    import tensorflow as tf

    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        return tf.TensorSpec(array.shape, "string")
    # As fit does: floats of any width become floatx.
    return tf.TensorSpec(array.shape, keras.config.floatx() if array.dtype.kind == "f" else array.dtype)


def _identifier(name: str) -> str:
    """TensorFlow takes only such names as arguments of a traced function."""
    name = re.sub(r"\W", "_", name)
    return name if name[:1].isalpha() else f"input_{name}"


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
