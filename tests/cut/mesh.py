"""Runs a step on a simulated mesh, cut along the data and model axes, with threads for ranks (see simulated.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from cut.layouts import Loss, Rules, axes
from cut.simulated import Exchange, SimulatedCollectives, chunks

from harness.threads import results_of
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import (
    Batch,
    LocalPart,
    Mirror,
    Mirrors,
    Program,
    Report,
    Sharded,
    Slices,
    Snapshots,
    build_step,
    cut_along_model,
)

Position = tuple[int, int]  # of a rank along the data axis and the model axis


class Mesh:
    """A step on data x model ranks.

    Args:
        step: a Python function of tensors with a batch along axis 0.
        arguments: an example batch.
        shape: ranks along the data axis, and along the model axis.
        variables: variables of the step; each rank has its shards or copies.
        layout: {id of a variable: axis} of variables cut along the model axis.
        static: whether tracing sees the number of rows.
        counts: rows of each data rank; None: as even as possible.
        along_batch: whether to cut along the batch as well. Optional with one data rank; the step, cut only along the
            model axis, then writes at once and takes half the time.
        options: options of build_step.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: Sequence[np.ndarray],
        shape: Position,
        variables: Sequence[tf.Variable],
        layout: Mapping[int, int],
        *,
        static: bool = True,
        counts: Sequence[int] | None = None,
        along_batch: bool = True,
        input_axes: Sequence[int | None] = (),
        mirrors: int | None = None,
        **options: Any,
    ) -> None:
        self._offset, self.snapshots, self._input_axes = mirrors, {}, input_axes
        self.shape, self.static, self.options = shape, static, options
        self.layout = dict(layout)
        self._arguments = len(arguments)
        self._by_handle = {id(each.handle): each for each in variables}
        data, model = shape
        self.positions = [(d, m) for d in range(data) for m in range(model)]
        rows = len(arguments[0])
        self._counts = counts
        self.chunks = self._chunks_of(rows)
        specs = [tf.TensorSpec([rows if static else None, *a.shape[1:]], a.dtype) for a in map(np.asarray, arguments)]
        self.concrete = tf.function(step, autograph=False).get_concrete_function(*specs)
        of_model, of_data = [Exchange(model) for _ in range(data)], [Exchange(data) for _ in range(model)]
        self._collectives = {(d, m): SimulatedCollectives(of_model[d], m) for d, m in self.positions}
        self._of_data = {(d, m): SimulatedCollectives(of_data[m], d) for d, m in self.positions}
        self.everyone = Exchange(len(self.positions))
        self._of_all = {at: SimulatedCollectives(self.everyone, rank) for rank, at in enumerate(self.positions)}
        self.model_reports = {at: Report() for at in self.positions}
        self.data_reports = {at: Report() for at in self.positions}
        self.copies = {
            at: {key: tf.Variable(self._share(each, each.numpy(), at[1])) for key, each in self._by_handle.items()}
            for at in self.positions
        }
        self.mirrors = {
            at: {
                key: tf.Variable(self._share(each, each.numpy(), (at[1] - (mirrors or 0)) % model)) for key, each in cut
            }
            for at in self.positions
            if (cut := [(key, each) for key, each in self._by_handle.items() if self._slices(each) is not None])
        }
        self._cut = {at: self._along_model(at) for at in self.positions}
        self.functions = {
            at: self._function(at) if along_batch else self._without_batch_cut(at) for at in self.positions
        }

    def _chunks_of(self, rows: int) -> list[tuple[int, int]]:
        if self._counts is None:
            return chunks(rows, self.shape[0])
        return [(sum(self._counts[:rank]), count) for rank, count in enumerate(self._counts)]

    def restart(self, reset: Callable[[], None]) -> None:
        """Runs `reset` and copies the variables' values to the ranks."""
        reset()
        for at, copies in self.copies.items():
            for key, each in self._by_handle.items():
                copies[key].assign(self._share(each, each.numpy(), at[1]))

    def _share(self, variable: tf.Variable, value: np.ndarray, rank: int) -> np.ndarray:
        slices = self._slices(variable)
        return value if slices is None else slices.cut(value, rank)

    def _slices(self, variable: tf.Variable) -> Slices | None:
        axis = self.layout.get(id(variable))
        return None if axis is None else Slices(tuple(variable.shape), self.shape[1], axis)

    def _local_part(self, outer: tf.Tensor, at: Position) -> LocalPart:
        variable = self._by_handle.get(id(outer))
        if variable is None:
            return LocalPart(outer)
        own, slices = self.copies[at][id(outer)].handle, self._slices(variable)
        return LocalPart(own) if slices is None else LocalPart(own, slices.placement)

    def _along_model(self, at: Position) -> Any:
        return cut_along_model(
            Program(self.concrete.graph),
            self._collectives[at],
            lambda outer: self._local_part(outer, at),
            placements=[Sharded(0)] * self._arguments,
            input_axes=self._input_axes,
            report=self.model_reports[at],
            seed=3,
        )

    def _function(self, at: Position) -> Any:
        first, count = self.chunks[at[0]]
        rows = sum(each for _, each in self.chunks)
        snapshots = self.snapshots[at] = Snapshots()

        def step(total: tf.Tensor, offset: tf.Tensor, mine: tf.Tensor, *local: tf.Tensor) -> Any:
            return build_step(
                self._cut[at].program(),
                local,
                [Sharded(0)] * len(local),
                Batch(rows, count, first) if self.static else Batch(total, mine, offset),
                self._of_data[at],
                report=self.data_reports[at],
                snapshots=snapshots,
                earlier=self._collectives[at],
                everyone=self._of_all[at],
                mirrors=None if self._offset is None else Mirrors(self._mirrors(at), self._offset),
                **self.options,
            )

        return tf.function(step, autograph=False)

    def _without_batch_cut(self, at: Position) -> Any:
        assert self.shape[0] == 1
        return lambda total, offset, mine, *local: self._cut[at].function(*local)

    def _mirrors(self, at: Position) -> list[Mirror]:
        def mirror(key: int, own: tf.Variable) -> Mirror:
            other = self.mirrors[at][key].handle if self._offset else None
            return Mirror(own.handle, other, self._slices(self._by_handle[key]), own.dtype)

        return [mirror(key, own) for key, own in self.copies[at].items() if key in self.mirrors[at]]

    def everything(self) -> list[np.ndarray]:
        """Returns the values of all ranks' variables without mirrors."""
        return [each.numpy() for copies in self.copies.values() for each in copies.values()]

    def expected(self, *arguments: np.ndarray) -> list[np.ndarray]:
        """Returns the results of one process."""
        return [np.asarray(each) for each in tf.nest.flatten(self.concrete(*map(tf.constant, arguments)))]

    def __call__(self, *arguments: np.ndarray) -> dict[Position, list[np.ndarray]]:
        """Returns the outputs of each rank."""
        parts = self._chunks_of(len(arguments[0]))

        def run(at: Position) -> list[np.ndarray]:
            first, mine = parts[at[0]]
            local = [tf.constant(each[first : first + mine]) for each in arguments]
            numbers = (tf.constant(n, tf.int64) for n in (len(arguments[0]), first, mine))
            return [np.asarray(each) for each in self.functions[at](*numbers, *local)]

        return results_of(run, self.positions)

    def complete(self, variable: tf.Variable, data_rank: int) -> np.ndarray:
        """Returns a variable, put together from the model ranks of one data rank."""
        axis = self.layout.get(id(variable))
        held = [self.copies[data_rank, m][id(variable.handle)].numpy() for m in range(self.shape[1])]
        if axis is None:
            assert all(np.array_equal(each, held[0], equal_nan=each.dtype.kind == "f") for each in held), variable.name
            return held[0]
        return np.concatenate(held, axis)

    def check(self, *arguments: np.ndarray, steps: int = 3, tolerance: float = 1e-12) -> Mesh:
        """Compares outputs and variables of some steps with one process, and the ranks' decisions with each other.

        Ranks that share a data or model position could not continue together if their decisions differed.
        """
        for _ in range(steps):
            expected = self.expected(*arguments)
            for outputs in self(*arguments).values():
                for mine, one in zip(outputs, expected, strict=True):
                    _assert_close(mine, one, tolerance)
        differs = self.decisions_differ()
        assert differs is None, differs
        for variable in self._by_handle.values():
            for data_rank in range(self.shape[0]):
                _assert_close(self.complete(variable, data_rank), variable.numpy(), tolerance, variable.name)
        return self

    def decisions_differ(self) -> str | None:
        """Describes how the collectives of ranks differ, or returns None."""
        for reports in (self.model_reports, self.data_reports):
            texts = [[(each.kind, each.values, each.reason) for each in report.entries] for report in reports.values()]
            for at, each in zip(reports, texts):
                if each != texts[0]:
                    return f"rank {at} makes other collectives: {each} for {texts[0]}"
        return None

    def kinds(self, axis: str = "model") -> list[str]:
        """Returns the kinds of a step's collectives along an axis."""
        return [kind for kind, _ in self.moved()[axis]]

    def moved(self) -> dict[str, list[tuple[str, int]]]:
        """Returns, by axis, the kind of each collective in a step and the number of its tensors."""
        reports = {"model": self.model_reports[0, 0], "data": self.data_reports[0, 0]}
        return {axis: [(each.kind, len(each.values)) for each in report.entries] for axis, report in reports.items()}


def _assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float, name: str = "") -> None:
    """`tolerance` holds for float64; float32 values, such as counts of metrics, get a larger one."""
    bound = max(tolerance, 1e-6) if expected.dtype == np.float32 else tolerance
    np.testing.assert_allclose(found, expected, rtol=bound, atol=bound, err_msg=name)


def variables_of(*holders: Any) -> list[tf.Variable]:
    """Returns the variables of models and optimizers without duplicates."""
    return list({id(each.value): each.value for one in holders for each in one.variables}.values())


def mesh_of(
    model: keras.Model,
    batch: Sequence[np.ndarray],
    shape: Position,
    rules: Rules | None = None,
    *,
    layout: Mapping[int, int] | None = None,
    optimizer: Any = None,
    loss: Loss | None = None,
    **options: Any,
) -> Mesh:
    """Returns a training step of a model on a mesh; by default with plain SGD and the mean squared error."""
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    loss = loss or keras.losses.MeanSquaredError()
    weights = model.trainable_variables
    optimizer.build(weights)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            result = loss(y, model(x, training=True))
            scaled = optimizer.scale_loss(result)
        optimizer.apply(tape.gradient(scaled, [each.value for each in weights]), weights)
        return result

    layout = axes(weights, optimizer, rules or {}) if layout is None else layout
    return Mesh(step, batch, shape, variables_of(model, optimizer), layout, **options)
