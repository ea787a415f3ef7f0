"""A step on a simulated mesh of data and model ranks, cut along both axes: threads for ranks, as in simulated.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from cut.simulated import Exchange, SimulatedCollectives, chunks

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import (
    Batch,
    HeldVariable,
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

Position = tuple[int, int]  # of a rank: along the data axis, along the model axis


class Mesh:
    """A step on data x model ranks.

    Args:
        step: a Python function of tensors with a batch along axis 0.
        arguments: an example batch.
        shape: ranks along the data axis, and along the model axis.
        variables: that the step uses; each rank has its shards or copies.
        layout: which axis of a variable is cut along the model axis, by id of the variable.
        static: whether tracing sees the number of rows.
        counts: rows of each data rank; None: even as far as they go.
        options: of build_step.
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
        mirrors: int | None = None,
        **options: Any,
    ) -> None:
        self._offset, self.snapshots = mirrors, {}
        self.shape, self.static, self.options = shape, static, options
        self.layout = dict(layout)
        self._arguments = len(arguments)
        self._by_handle = {id(each.handle): each for each in variables}
        data, model = shape
        self.positions = [(d, m) for d in range(data) for m in range(model)]
        rows = len(arguments[0])
        self.chunks = chunks(rows, data)
        if counts is not None:
            self.chunks = [(sum(counts[:rank]), count) for rank, count in enumerate(counts)]
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
        self.functions = {at: self._function(at) for at in self.positions}

    def _share(self, variable: tf.Variable, value: np.ndarray, rank: int) -> np.ndarray:
        slices = self._slices(variable)
        return value if slices is None else slices.cut(value, rank)

    def _slices(self, variable: tf.Variable) -> Slices | None:
        axis = self.layout.get(id(variable))
        return None if axis is None else Slices(tuple(variable.shape), self.shape[1], axis)

    def _held(self, outer: tf.Tensor, at: Position) -> HeldVariable:
        variable = self._by_handle.get(id(outer))
        if variable is None:
            return HeldVariable(outer)
        own, slices = self.copies[at][id(outer)].handle, self._slices(variable)
        return HeldVariable(own) if slices is None else HeldVariable(own, slices.placement)

    def _along_model(self, at: Position) -> Any:
        return cut_along_model(
            Program(self.concrete.graph),
            self._collectives[at],
            lambda outer: self._held(outer, at),
            placements=[Sharded(0)] * self._arguments,
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

    def _mirrors(self, at: Position) -> list[Mirror]:
        def mirror(key: int, own: tf.Variable) -> Mirror:
            other = self.mirrors[at][key].handle if self._offset else None
            return Mirror(own.handle, other, self._slices(self._by_handle[key]), own.dtype)

        return [mirror(key, own) for key, own in self.copies[at].items() if key in self.mirrors[at]]

    def expected(self, *arguments: np.ndarray) -> list[np.ndarray]:
        """Returns what one process gives."""
        return [np.asarray(each) for each in tf.nest.flatten(self.concrete(*map(tf.constant, arguments)))]

    def __call__(self, *arguments: np.ndarray) -> dict[Position, list[np.ndarray]]:
        """Returns the outputs of each rank."""
        results: dict[Position, Any] = {}

        def run(at: Position) -> None:
            first, mine = self.chunks[at[0]]
            local = [tf.constant(each[first : first + mine]) for each in arguments]
            numbers = (tf.constant(n, tf.int64) for n in (len(arguments[0]), first, mine))
            try:
                results[at] = [np.asarray(each) for each in self.functions[at](*numbers, *local)]
            except Exception as error:
                results[at] = error

        threads = [threading.Thread(target=run, args=(at,)) for at in self.positions]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for each in results.values():
            if isinstance(each, Exception):
                raise each
        return results

    def complete(self, variable: tf.Variable, data_rank: int) -> np.ndarray:
        """Returns what the model ranks of one data rank hold of a variable together."""
        axis = self.layout.get(id(variable))
        held = [self.copies[data_rank, m][id(variable.handle)].numpy() for m in range(self.shape[1])]
        if axis is None:
            assert all(np.array_equal(each, held[0], equal_nan=each.dtype.kind == "f") for each in held), variable.name
            return held[0]
        return np.concatenate(held, axis)

    def check(self, *arguments: np.ndarray, steps: int = 3, tolerance: float = 1e-12) -> Mesh:
        """Compares the outputs of some steps, and all variables after them, with one process, and the ranks' decisions.

        Ranks with one data position or one model position that decided otherwise could not continue together.
        """
        for _ in range(steps):
            expected = self.expected(*arguments)
            for outputs in self(*arguments).values():
                for mine, one in zip(outputs, expected, strict=True):
                    np.testing.assert_allclose(mine, one, rtol=tolerance, atol=tolerance)
        for reports in (self.model_reports, self.data_reports):
            entries = [
                [(each.kind, each.values, each.reason) for each in report.entries] for report in reports.values()
            ]
            assert all(each == entries[0] for each in entries)
        for variable in self._by_handle.values():
            for data_rank in range(self.shape[0]):
                held = self.complete(variable, data_rank)
                np.testing.assert_allclose(
                    held, variable.numpy(), rtol=tolerance, atol=tolerance, err_msg=variable.name
                )
        return self

    def moved(self) -> dict[str, list[tuple[str, int]]]:
        """Returns the kind of each collective of a step and how many tensors it moves, by axis."""
        reports = {"model": self.model_reports[0, 0], "data": self.data_reports[0, 0]}
        return {axis: [(each.kind, len(each.values)) for each in report.entries] for axis, report in reports.items()}
