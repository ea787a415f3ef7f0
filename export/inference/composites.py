"""Splits sparse and ragged tensors into dense components, because signatures take only dense tensors, and joins them.

tf.SparseTensor x  ->  x_values [n], x_indices [n, rank] int64, x_dense_shape [rank] int64
tf.RaggedTensor x  ->  x_values [n, ...], x_row_splits [rows + 1] int64; with several ragged dimensions x_row_splits_0,
                       x_row_splits_1, ..., the outermost first

The names are those of the classes' attributes, joined by "_", which Python allows in a keyword.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from keras_ddl.errors import ExportError

_VALUES, _INDICES, _SHAPE, _SPLITS = "_values", "_indices", "_dense_shape", "_row_splits"


def is_composite(tensor: Any) -> bool:
    """Whether a tensor, a spec, or a KerasTensor is sparse or ragged."""
    import tensorflow as tf

    if hasattr(tensor, "tocoo"):  # a scipy matrix, which fit also takes
        return True
    kinds = (tf.SparseTensor, tf.RaggedTensor, tf.SparseTensorSpec, tf.RaggedTensorSpec)
    return isinstance(tensor, kinds) or bool(getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False))


def spec_of(tensor: Any) -> Any:
    """Returns the tf.SparseTensorSpec or tf.RaggedTensorSpec of a composite; its first dimension is open."""
    import keras
    import tensorflow as tf

    if isinstance(tensor, (tf.SparseTensorSpec, tf.RaggedTensorSpec)):
        spec = tensor
    elif isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor)):
        spec = tf.type_spec_from_value(tensor)
    elif hasattr(tensor, "tocoo"):
        spec = tf.SparseTensorSpec(tensor.shape, keras.config.floatx() if tensor.dtype.kind == "f" else tensor.dtype)
    else:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if tensor.sparse:
            spec = tf.SparseTensorSpec(tensor.shape, dtype)
        else:
            open_ones = [i for i, size in enumerate(tensor.shape) if i and size is None]
            spec = tf.RaggedTensorSpec(tensor.shape, dtype, tensor.ragged_rank or max(open_ones, default=1))
    if spec.shape.rank is None:
        raise ExportError(
            f"A sparse or ragged input must have a known rank, because the shapes of its components depend on it. "
            f"Received: {spec}. Give input_signature= with a shape."
        )
    shape = [None, *spec.shape.as_list()[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    # The rows of one batch may have equal lengths by chance.
    shape = [None if i <= spec.ragged_rank else size for i, size in enumerate(shape)]
    return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, tf.int64)


def component_specs(name: str, spec: Any) -> dict[str, Any]:
    """Returns component name -> tf.TensorSpec of a composite input."""
    import tensorflow as tf

    rank = spec.shape.rank
    if isinstance(spec, tf.SparseTensorSpec):
        shapes = {_VALUES: ([None], spec.dtype), _INDICES: ([None, rank], tf.int64), _SHAPE: ([rank], tf.int64)}
    else:
        values = [None, *spec.shape.as_list()[spec.ragged_rank + 1 :]]
        shapes = {_VALUES: (values, spec.dtype)}
        shapes |= {suffix: ([None], tf.int64) for suffix in _splits_suffixes(spec.ragged_rank)}
    return {name + suffix: tf.TensorSpec(shape, dtype, name=name + suffix) for suffix, (shape, dtype) in shapes.items()}


def assemble(name: str, spec: Any, tensors: Mapping[str, Any]) -> Any:
    """Joins components from a client to a sparse or ragged tensor. Invalid components fail in the graph."""
    import tensorflow as tf

    values = tensors[name + _VALUES]
    if isinstance(spec, tf.RaggedTensorSpec):
        splits = [tensors[name + suffix] for suffix in _splits_suffixes(spec.ragged_rank)]
        return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=True)
    indices, sent = tensors[name + _INDICES], tensors[name + _SHAPE]
    # Known sizes become constants, so that layers see them and no request can claim a huge one.
    sizes = spec.shape.as_list()
    shape = tf.stack([sent[i] if size is None else tf.constant(size, tf.int64) for i, size in enumerate(sizes)])
    fits = f"{name + _SHAPE} must be {sizes}, where None is any size"
    inside = f"{name + _INDICES} must be 0 or more, and below {name + _SHAPE}"
    pairs = f"{name + _INDICES} must have one row for each entry of {name + _VALUES}"
    checks = [
        tf.debugging.assert_equal(sent, shape, fits),
        tf.debugging.assert_non_negative(sent, fits),
        tf.debugging.assert_non_negative(indices, inside),
        tf.debugging.assert_less(indices, sent[tf.newaxis], inside),
        tf.debugging.assert_equal(tf.shape(indices)[0], tf.shape(values)[0], pairs),
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.SparseTensor(tf.identity(indices), tf.identity(values), shape)


def components(name: str, tensor: Any) -> dict[str, Any]:
    """Returns component name -> dense tensor of a sparse or ragged one."""
    import tensorflow as tf

    if isinstance(tensor, tf.SparseTensor):
        return {name + _VALUES: tensor.values, name + _INDICES: tensor.indices, name + _SHAPE: tensor.dense_shape}
    splits = [tf.cast(each, tf.int64) for each in tensor.nested_row_splits]
    return {name + _VALUES: tensor.flat_values, **dict(zip(map(name.__add__, _splits_suffixes(len(splits))), splits))}


def of_sample(name: str, spec: Any, value: Any) -> dict[str, Any]:
    """Returns component name -> array of sample rows: a sparse or ragged tensor, a scipy matrix, or what `fit` takes.

    Raises: ExportError: `value` is none of these, or has another shape.
    """
    import tensorflow as tf

    ragged = isinstance(spec, tf.RaggedTensorSpec)
    try:
        if hasattr(value, "tocoo"):
            value = value.toarray()
        if not isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
            value = tf.ragged.constant(value, ragged_rank=spec.ragged_rank) if ragged else tf.sparse.from_dense(value)
        right = isinstance(value, tf.RaggedTensor) == ragged and spec.shape.is_compatible_with(value.shape)
        if not right or (ragged and value.ragged_rank != spec.ragged_rank):
            raise ValueError(f"{type(value).__name__} of shape {value.shape}")
        value = tf.cast(value, spec.dtype)
    except (ValueError, TypeError) as error:
        raise ExportError(f"sample rows must fit input {name!r}, {spec}. Received: {error}.") from None
    return {each: tensor.numpy() for each, tensor in components(name, value).items()}


def rows_in(names: Iterable[str], arrays: Mapping[str, Any]) -> int:
    """Returns the number of rows in the arrays of a signature's inputs. `names`: the composite inputs."""
    for name in names:
        if name + _SHAPE in arrays:
            return int(arrays[name + _SHAPE][0])
        outermost = name + _SPLITS if name + _SPLITS in arrays else f"{name}{_SPLITS}_0"
        if outermost in arrays:
            return len(arrays[outermost]) - 1
    return max((len(array) for array in arrays.values() if array.ndim), default=1)


def found_in(names: Iterable[str]) -> list[str]:
    """Returns the names of composite tensors whose components are among `names`."""
    names = set(names)
    values = [name.removesuffix(_VALUES) for name in sorted(names) if name.endswith(_VALUES)]
    sparse = [name for name in values if {name + _INDICES, name + _SHAPE} <= names]
    return sparse + [name for name in values if {name + _SPLITS, f"{name}{_SPLITS}_0"} & names]


def make_consistent(shapes: Mapping[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """Changes made-up components so that each composite input is a valid tensor with one value in each row.

    Args:
        shapes: composite input -> its shape, with None for open dimensions; or None if the shape is unknown.
    """
    import numpy as np

    for name, shape in shapes.items():
        rows = len(arrays[name + _VALUES])
        if name + _SHAPE in arrays:
            rank = len(arrays[name + _SHAPE])
            sizes = [size or 1 for size in (shape or [None] * rank)]
            indices = np.array([[i] + [0] * (rank - 1) for i in range(rows)], np.int64)
            arrays[name + _INDICES] = indices.reshape(-1, rank)
            arrays[name + _SHAPE] = np.array([rows, *sizes[1:]], np.int64)
        else:
            for each in [each for each in arrays if each.startswith(name + _SPLITS)]:
                arrays[each] = np.arange(rows + 1, dtype=np.int64)
    return arrays


def _splits_suffixes(ragged_rank: int) -> list[str]:
    return [_SPLITS] if ragged_rank == 1 else [f"{_SPLITS}_{i}" for i in range(ragged_rank)]
