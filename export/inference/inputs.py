"""Describes a model's inputs: names, dtypes and shapes of the serving signature, and sample rows that fit them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export.inference import composites
from keras_ddl.export.inference.replay import texts

_RECORDED = "_keras_ddl_inputs"
_AUTOMATIC = re.compile(r"|(keras_tensor|input_layer|input)(_\d+)?")
_MADE_UP_ROWS = 2
_MADE_UP_LENGTH = 8  # length of open dimensions other than the batch


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model or of a `Function`.

    Attributes:
        structure: the structure of the model's argument, with names instead of tensors.
        specs: name -> tf.TensorSpec of the signature's dense tensors.
        composites: name -> spec of sparse and ragged inputs, whose components are in `specs`.
    """

    structure: Any
    specs: dict[str, Any]
    composites: dict[str, Any] = field(default_factory=dict)

    @property
    def leaves(self) -> dict[str, Any]:
        """Name -> spec of each input, without splitting sparse and ragged inputs."""
        from keras import tree

        names = tree.flatten(self.structure)
        return {name: self.composites[name] if name in self.composites else self.specs[name] for name in names}

    def assemble(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns name -> tensor of each input; joins sparse and ragged inputs from the signature's tensors."""
        return {
            name: composites.assemble(name, spec, tensors) if name in self.composites else tensors[name]
            for name, spec in self.leaves.items()
        }

    def pack(self, tensors: Mapping[str, Any]) -> Any:
        """Returns the signature's tensors in the structure that the model takes."""
        from keras import tree

        leaves = self.assemble(tensors)
        return tree.map_structure(lambda name: leaves[name], self.structure)

    def flatten(self, sample: Any) -> dict[str, Any]:
        """Returns name -> array of sample rows in the model's structure (or already name -> array).

        Raises: ExportError: the structure or a shape does not fit.
        """
        import numpy as np
        from keras import tree

        if isinstance(sample, Mapping) and set(sample) == set(self.specs):
            pairs = list(sample.items())
        elif isinstance(self.structure, str) and not isinstance(sample, Mapping):
            pairs = [(self.structure, sample)]
        else:
            try:
                # As in fit, lists and tuples are equivalent.
                tree.assert_same_structure(tree.lists_to_tuples(self.structure), tree.lists_to_tuples(sample))
            except (ValueError, TypeError):
                raise ExportError(
                    f"sample must have the structure that the model takes. Received: {type(sample).__name__}; "
                    f"the model takes {self.structure!r}."
                ) from None
            pairs = list(zip(tree.flatten(self.structure), tree.flatten(sample)))
        arrays: dict[str, Any] = {}
        for name, value in pairs:
            if name in self.composites:
                parts = composites.of_sample(name, self.composites[name], value)
                arrays |= {part: texts(array) if array.dtype.kind in "OSU" else array for part, array in parts.items()}
                continue
            spec = self.specs[name]
            is_text = spec.dtype.name == "string"
            array = texts(value) if is_text else np.asarray(value).astype(spec.dtype.as_numpy_dtype)
            if not spec.shape.is_compatible_with(array.shape):
                raise ExportError(
                    f"sample rows must have the shape that input {name!r} takes, {spec.shape}. Received: {array.shape}."
                )
            arrays[name] = array
        return arrays

    def made_up_sample(self) -> dict[str, Any]:
        """Returns name -> array of a few rows: floats in [0, 1), integers 0 or 1, short strings. Deterministic."""
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
        shapes = {name: spec.shape.as_list() for name, spec in self.composites.items()}
        return composites.make_consistent(shapes, arrays)


def inputs_are_known(model: Any) -> bool:
    """Whether `write_base_graph` can trace `model` now, without input_signature= or sample=.

    True for Functional and built Sequential models, and after `record_inputs` has seen the first call.
    """
    return _symbolic_inputs(model) is not None or getattr(model, _RECORDED, None) is not None


def record_inputs(model: Any) -> None:
    """Records dtypes and shapes of a subclassed model's next call (Keras keeps only shapes).

    Call it in on_train_begin; after the first train batch `inputs_are_known(model)` is True.
    """
    if inputs_are_known(model) or "call" in vars(model):
        return
    call = model.call

    def recording_call(*args: Any, **kwargs: Any) -> Any:
        from keras import tree

        inputs = args[0] if args else next(iter(kwargs.values()))
        # object.__setattr__ bypasses Keras's tracking, which is for layers and weights.
        object.__setattr__(model, _RECORDED, tree.map_structure(_spec_of, inputs))
        object.__delattr__(model, "call")
        return call(*args, **kwargs)

    object.__setattr__(model, "call", recording_call)


def find_inputs(model: Any, input_signature: Any = None, sample: Any = None) -> Inputs:
    """Returns the serving signature's inputs: from `input_signature`, the model, its first call, or `sample`.

    The first dimension of each input is open. Raises: ExportError: no source is available.
    """
    from keras import tree

    symbolic = _symbolic_inputs(model)
    if input_signature is not None:
        structure = input_signature
    elif symbolic is not None:
        structure = symbolic
    else:
        structure = getattr(model, _RECORDED, None)
        if structure is None and sample is not None:
            structure = tree.map_structure(spec_of_sample, sample)
    if structure is None:
        raise ExportError(
            f"A serving signature needs the dtypes of the model's inputs. Received: {type(model).__name__} "
            f"{model.name!r}, a subclassed model that has not been called yet. Give sample= or input_signature="
            f"tf.TensorSpec(...), in the structure that call() takes."
        )
    return as_inputs(structure, next(iter(inspect.signature(model.call).parameters), "inputs"))


def as_inputs(structure: Any, first: str = "inputs") -> Inputs:
    """Returns the inputs for a structure of specs or tensors. The first dimension of each input is open.

    Args:
        first: the name for inputs without a name.
    """
    import tensorflow as tf
    from keras import tree

    names: list[str] = []
    specs: dict[str, Any] = {}
    composite_specs: dict[str, Any] = {}
    for path, leaf in tree.flatten_with_path(structure):
        spec = _spec_of(leaf)
        if path and all(isinstance(part, str) for part in path):
            name = "_".join(path)
        else:
            name = getattr(leaf, "name", None) or ""
            # Keras numbers unnamed inputs per process, so clients cannot rely on these names.
            name = "_".join([first, *map(str, path)]) if _AUTOMATIC.fullmatch(name) else name
        name = re.sub(r"\W", "_", name)  # valid as the name of a function's argument
        name = _unique(name if name[:1].isalpha() else f"input_{name}", {*names, *specs})
        names.append(name)
        if composites.is_composite(spec):
            composite_specs[name] = composites.spec_of(spec)
            specs |= composites.component_specs(name, composite_specs[name])
        else:
            shape = [None, *spec.shape.as_list()[1:]] if spec.shape.rank else spec.shape
            specs[name] = tf.TensorSpec(shape, spec.dtype, name=name)
    return Inputs(tree.pack_sequence_as(structure, names), specs, composite_specs)


def _symbolic_inputs(model: Any) -> Any:
    """Returns the KerasTensors that a Functional or Sequential model was built from, else None."""
    import keras

    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    return inputs[0] if isinstance(model, keras.Sequential) else model.input


def _spec_of(tensor: Any) -> Any:
    import keras
    import tensorflow as tf

    if composites.is_composite(tensor):
        return composites.spec_of(tensor)
    dtype = tensor.dtype if isinstance(tensor, tf.TensorSpec) else keras.backend.standardize_dtype(tensor.dtype)
    return tf.TensorSpec(tensor.shape, dtype)


def spec_of_sample(value: Any) -> Any:
    """Returns the spec of rows in a form that `fit` takes."""
    import keras
    import numpy as np
    import tensorflow as tf

    if composites.is_composite(value):
        return composites.spec_of(value)
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        return tf.TensorSpec(array.shape, "string")
    # As in fit, floats of any width become floatx.
    return tf.TensorSpec(array.shape, keras.config.floatx() if array.dtype.kind == "f" else array.dtype)


def _unique(name: str, taken: Collection[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
