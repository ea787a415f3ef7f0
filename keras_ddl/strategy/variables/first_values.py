"""Makes only part of a variable's initial value, bitwise equal to that of one process.

Keras's initializers draw with counter-based generators, so that any stretch of a draw can be made separately
(cut/operations/philox.py), and then compute each entry from one drawn number. So the initializer is traced once, and
the graph is evaluated for one stretch of entries after another. Other initializers (Orthogonal, the program's own)
make all entries at once and have no `Recipe`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_ddl.compat import models
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import FuncGraph, tf
from keras_ddl.cut.analysis import variable_ops
from keras_ddl.cut.operations import philox
from keras_ddl.cut.values.layouts import Runs

_NAMES = (
    "Zeros Ones Constant RandomNormal RandomUniform TruncatedNormal VarianceScaling "
    "GlorotNormal GlorotUniform HeNormal HeUniform LecunNormal LecunUniform"
)
_INITIALIZERS = {name: getattr(keras.initializers, name) for name in _NAMES.split(" ")}
_TRUNCATED = "StatelessTruncatedNormalV2"
_DRAWS = ("StatelessRandomUniformV2", "StatelessRandomNormalV2", _TRUNCATED)
_ENTRYWISE = ("AddV2", "Sub", "Mul", "RealDiv", "Cast", "Identity")
_BLOCK = 1 << 20  # entries that are computed at a time


class Recipe(NamedTuple):
    """One of Keras's initializers, in a form that ranks can exchange.

    Attributes:
        config: the initializer's config without the seed.
        seed: the seed of the draw; None: nothing is drawn.
    """

    name: str
    config: dict[str, Any]
    seed: int | np.ndarray | None


class _Drawn(keras.random.SeedGenerator):
    """A generator that returns a seed drawn by another generator."""

    def __init__(self, seed: np.ndarray) -> None:
        self._seed = seed

    def next(self, ordered: bool = True) -> tf.Tensor:
        return tf.constant(self._seed)


def recipe_of(initializer: Any) -> Recipe | None:
    """Returns the recipe of an initializer; None if it makes all entries at once.

    A recipe takes the next seed of the initializer's generator, as the initializer would do.
    """
    name = type(initializer).__name__
    if _INITIALIZERS.get(name) is not type(initializer) or np.ndim(getattr(initializer, "value", 0)):
        return None
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, keras.random.SeedGenerator):
        seed = np.asarray(seed.next())
    config = initializer.get_config()
    if "seed" in config:
        config["seed"] = 0  # unused; with None, from_config would draw a seed from Python's generator
    return Recipe(name, config, seed)


def shape_of_new(variable: Any, value: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape of a Keras variable to be made from `value`, and the value.

    A function is only called if its result is needed to find the shape.
    """
    shape = models.declared_shape(variable)
    if shape is None:
        value = called(value)
        shape = tuple(tf.convert_to_tensor(value).shape)
    return shape, value


def called(value: Any) -> Any:
    """Returns `value`, or its result if it is a function."""
    return value() if callable(value) else value


class FirstValue:
    """The value that a recipe makes for a shape and a dtype.

    Attributes: shape, dtype: shape and dtype of the complete value.
    """

    def __init__(self, recipe: Recipe, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = tf.TensorShape(shape), tf.as_dtype(dtype)
        seed = recipe.seed
        initializer = _INITIALIZERS[recipe.name].from_config(recipe.config)
        if seed is not None:
            initializer.seed = _Drawn(seed) if isinstance(seed, np.ndarray) else seed
        self._graph = FuncGraph("first_value")
        with self._graph.as_default():
            self._output = tf.convert_to_tensor(initializer(shape, dtype=dtype))
        self._scalars = {id(inner): outer for outer, inner in self._graph.captures}
        self.is_possible = self._is_possible(self._output)

    def _is_possible(self, tensor: tf.Tensor) -> bool:
        """Whether a stretch of a tensor of this shape can be made separately."""
        operation = tensor.op
        if operation.type in _DRAWS:
            return int(self._scalar(operation.inputs[3])) in philox.ALGORITHMS
        if operation.type not in _ENTRYWISE:
            return operation.type in ("Fill", "Const")
        operands = [each for each in operation.inputs if each.shape.rank]
        return all(each.shape == self.shape and self._is_possible(each) for each in operands)

    def share(self, runs: Runs, shape: Any) -> tf.Tensor:
        """Returns the entries of some runs, reshaped to `shape`.

        Cost: memory for the entries and a few MB; unless all entries are equal, twice that while they are made.
        """
        if not runs.length * runs.number:  # more ranks than rows
            return tf.zeros(shape, self.dtype)
        if self.is_constant:
            return tf.fill(shape, self._stretch(self._output, 0, 1)[0])
        parts = list(self._parts(runs))
        return tf.reshape(parts[0] if len(parts) == 1 else tf.concat(parts, 0), shape)

    def put(self, variable: Any, runs: Runs) -> None:
        """Assigns the entries of some runs to a variable. Cost: a few MB, if the variable is a vector."""
        is_small = runs.length * runs.number <= _BLOCK
        if is_small or variable.shape.rank != 1 or self.is_constant or tf.config.functions_run_eagerly():
            variable.assign(self.share(runs, variable.shape))
            return
        variable.assign(tf.zeros(variable.shape, self.dtype))
        begin = 0
        for part in self._parts(runs):
            _replace(variable.handle, tf.constant(begin, tf.int64), tf.reshape(part, [-1]))
            begin += int(tf.size(part))

    def _parts(self, runs: Runs) -> Iterator[tf.Tensor]:
        """Yields the entries of some runs, some at a time."""
        if runs.length < _BLOCK and runs.stride != runs.length:
            yield from self._columns(runs)
            return
        for number in range(runs.number):
            yield from self._blocks(runs.first + number * runs.stride, runs.length)

    @property
    def is_constant(self) -> bool:
        return not self._differs(self._output)

    def _blocks(self, first: int, count: int) -> Iterator[tf.Tensor]:
        """Yields a run, some entries at a time."""
        for begin in range(first, first + count, _BLOCK):
            yield self._stretch(self._output, begin, min(_BLOCK, first + count - begin))

    def _columns(self, runs: Runs) -> Iterator[tf.Tensor]:
        """Yields short runs, some at a time. Whole strides are drawn, and entries between the runs are dropped."""
        many = max(1, _BLOCK // runs.stride)
        begin = runs.first % runs.stride
        for number in range(0, runs.number, many):
            some = min(many, runs.number - number)
            drawn = self._stretch(self._output, number * runs.stride, some * runs.stride)
            yield tf.reshape(drawn, [some, runs.stride])[:, begin : begin + runs.length]

    def _differs(self, tensor: tf.Tensor) -> bool:
        operation = tensor.op
        if operation.type in _ENTRYWISE:
            return any(self._differs(each) for each in operation.inputs if each.shape.rank)
        return bool(operation.type != "Fill")

    def _stretch(self, tensor: tf.Tensor, first: int, count: int) -> tf.Tensor:
        """Returns the entries of a tensor of this shape that follow the first `first` ones in flat order."""
        operation = tensor.op
        if operation.type in _DRAWS:
            return self._draw(operation, first, count)
        if operation.type == "Fill":
            return tf.fill([count], self._scalar(operation.inputs[1]))
        if operation.type == "Const":
            return tf.constant(tf.make_ndarray(operation.get_attr("value")).reshape(-1)[first : first + count])
        operands = [
            self._stretch(each, first, count) if each.shape.rank else self._scalar(each) for each in operation.inputs
        ]
        return _run(operation, operands)

    def _draw(self, operation: tf.Operation, first: int, count: int) -> tf.Tensor:
        key, counter, algorithm = (self._scalar(each) for each in operation.inputs[1:])
        dtype = operation.outputs[0].dtype
        return philox.stretch(
            lambda moved, shape: _run(operation, [tf.convert_to_tensor(shape), key, moved, algorithm]),
            counter,
            first,
            [count],
            dtype,
            in_groups=first % philox.numbers_per_group(dtype) == 0,
            counters_of_a_group=philox.counters_per_truncated_group(dtype) if operation.type == _TRUNCATED else 1,
        )

    def _scalar(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the value of a small tensor: a bound, a seed, a counter."""
        if id(tensor) not in self._scalars:
            operation = tensor.op
            if operation.type == "Const":
                values = [tf.constant(tf.make_ndarray(operation.get_attr("value")))]
            else:
                made = _run(operation, [self._scalar(each) for each in operation.inputs])
                values = list(made) if isinstance(made, (list, tuple)) else [made]
            self._scalars.update((id(each), value) for each, value in zip(operation.outputs, values))
        return self._scalars[id(tensor)]


@tf.function(reduce_retracing=True, autograph=False)
def _replace(handle: tf.Tensor, begin: tf.Tensor, part: tf.Tensor) -> None:
    """Replaces entries of a vector in a variable, in its memory."""
    value = variable_ops.taken(handle, part.dtype)
    variable_ops.assign(handle, variable_ops.replaced(value, begin, part))


def _run(operation: tf.Operation, inputs: list[tf.Tensor]) -> Any:
    """Runs an operation of a graph eagerly on other inputs."""
    function = getattr(tf.raw_ops, operation.type)
    named = dict(zip((each.name for each in operation.op_def.input_arg), inputs, strict=True))
    attributes = {each.name for each in operation.op_def.attr} & set(inspect.signature(function).parameters)
    return function(**named, **{name: operation.get_attr(name) for name in attributes})
