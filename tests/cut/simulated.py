"""Runs a cut step on simulated ranks in this process: threads act as ranks, and NumPy carries out collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cut.comparing import TOLERANCE, difference

from harness.threads import results_of
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Batch, Mirror, Mirrors, Program, Report, Sharded, Snapshots, build_step
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.values.collectives import GATHER, PLAIN, Collectives, Depths, Reduction
from keras_ddl.cut.values.layouts import Layout

# A waiting rank blocks one of TensorFlow's threads for operations (conftest.py).
assert tf.config.threading.get_inter_op_parallelism_threads() >= 32

_COMBINE = {
    "sum": lambda parts: np.sum(parts, axis=0, dtype=parts[0].dtype),
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
    "product": lambda parts: np.prod(parts, axis=0, dtype=parts[0].dtype),
}


class Exchange:
    """Exchanges values between the ranks' threads, by name."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.breaks = ""  # the name of a collective that fails
        self._timeout = timeout
        self._condition = threading.Condition()
        self._given: dict[str, dict[int, Any]] = {}
        self._taken: dict[str, int] = {}

    def meet(self, name: str, rank: int, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        if name == self.breaks:
            raise RuntimeError(f"{name}: a rank was lost")
        with self._condition:
            while rank in self._given.get(name, {}):  # the next round of a loop, while others still leave the last one
                assert self._condition.wait(self._timeout), f"{name}: not all ranks left"
            self._given.setdefault(name, {})[rank] = value
            self._condition.notify_all()
            done = self._condition.wait_for(lambda: len(self._given[name]) == self.size, self._timeout)
            assert done, f"{name}: only ranks {sorted(self._given[name])} came"
            results = [self._given[name][each] for each in range(self.size)]
            self._taken[name] = self._taken.get(name, 0) + 1
            if self._taken[name] == self.size:
                self._given[name], self._taken[name] = {}, 0
            self._condition.notify_all()
            return results


class OneBucket(Collectives):
    """Collectives with one bucket per dtype."""

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        return [[i for i, each in enumerate(dtypes) if each == dtype] for dtype in dict.fromkeys(dtypes)]


class SimulatedCollectives(OneBucket):
    """One rank's collectives."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange = exchange
        self.rank = rank
        self.size = exchange.size
        self._kinds: dict[bytes, str] = {}  # by TensorFlow's token of the Python function

    def kind_of(self, node: Node) -> str | None:
        return self._kinds.get(node.attr("token", bytes)) if node.type == "PyFunc" else None

    def _known(self, results: list[tf.Tensor], kind: str) -> list[tf.Tensor]:
        self._kinds[results[0].op.get_attr("token")] = kind
        return results

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, how: Reduction = PLAIN) -> list[tf.Tensor]:
        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            everyone = self.exchange.meet(name, self.rank, arrays)
            return [_COMBINE[op](list(each)) for each in zip(*everyone)]

        results = tf.nest.flatten(tf.numpy_function(run, list(tensors), [each.dtype for each in tensors]))
        return self._known(results, op)

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        def run(array: np.ndarray) -> np.ndarray:
            return np.concatenate(self.exchange.meet(name, self.rank, array))

        results = tf.numpy_function(run, [tensor], tensor.dtype)
        results.set_shape([None, *tensor.shape.as_list()[1:]])
        return self._known([results], GATHER)[0]

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        def run(array: np.ndarray) -> np.ndarray:
            total = np.sum(self.exchange.meet(name, self.rank, array), axis=0, dtype=array.dtype)
            return np.array_split(total, self.size)[self.rank]

        results = tf.numpy_function(run, [tensor], tensor.dtype)
        results.set_shape([None, *tensor.shape.as_list()[1:]])
        return results

    def shift(self, tensor: tf.Tensor, offset: int, name: str) -> tf.Tensor:
        def run(array: np.ndarray) -> np.ndarray:
            return self.exchange.meet(name, self.rank, array)[(self.rank - offset) % self.size]

        results = tf.numpy_function(run, [tensor], tensor.dtype)
        results.set_shape([None, *tensor.shape.as_list()[1:]])
        return results

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str, depths: Depths | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        def run(array: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            sent = np.split(array, np.cumsum(counts)[:-1])
            parts = [each[self.rank] for each in self.exchange.meet(name, self.rank, sent)]
            return np.concatenate(parts), np.array([len(each) for each in parts])

        rows, counts = tf.numpy_function(run, [tensor, splits], [tensor.dtype, tf.int64])
        rows.set_shape([None, *tensor.shape.as_list()[1:]])
        counts.set_shape([self.size])
        return rows, counts


def chunks(rows: int, size: int) -> list[tuple[int, int]]:
    """Returns (first row, number of rows) by rank, as even as possible."""
    base, extra = divmod(rows, size)
    counts = [base + (rank < extra) for rank in range(size)]
    return [(sum(counts[:rank]), counts[rank]) for rank in range(size)]


class Simulation:
    """A step on simulated ranks, which keep their own variables.

    Args:
        step: a Python function of tensors with a batch along axis 0.
        arguments: an example batch, for shapes and dtypes. Arguments with rows unlike the first's are further batches.
        static: whether tracing sees the number of rows.
        chunks: returns (first row, number of rows) by rank.
        variables: variables of the step; each rank has its own copies.
        sharded: variables of which each rank has a chunk.
        mirrors: the offset of the rank that mirrors a chunk; 0: no mirrors.
        options: options of build_step.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: Sequence[np.ndarray],
        size: int,
        *,
        static: bool = True,
        chunks: Callable[[int, int], list[tuple[int, int]]] = chunks,
        variables: Sequence[tf.Variable] = (),
        sharded: Sequence[tf.Variable] = (),
        mirrors: int = 0,
        **options: Any,
    ) -> None:
        self.size, self.static, self.chunks, self.options = size, static, chunks, options
        self.variables = list(variables)
        self.reports = [Report() for _ in range(size)]
        self._sizes = list(dict.fromkeys(each.shape[0] for each in arguments))
        self._batches = [self._sizes.index(each.shape[0]) for each in arguments]
        specs = [
            tf.TensorSpec([a.shape[0] if static else None, *a.shape[1:]], a.dtype) for a in map(np.asarray, arguments)
        ]
        self.concrete = tf.function(step, autograph=False).get_concrete_function(*specs)
        self.exchange = Exchange(size)
        self.snapshots = [Snapshots() for _ in range(size)]
        self.copies = [
            {id(each.handle): tf.Variable(each, trainable=each.trainable) for each in variables} for _ in range(size)
        ]
        for rank, copies in enumerate(self.copies):
            for each in sharded:
                copies[id(each.handle)] = tf.Variable(self.layout(each).cut(each.numpy(), rank))
        self.mirrors: list[dict[int, tf.Variable]] = [{} for _ in range(size)]
        for rank, held in enumerate(self.mirrors if mirrors else []):
            for each in sharded:
                held[id(each.handle)] = tf.Variable(self.layout(each).cut(each.numpy(), (rank - mirrors) % size))
        self._offset, self._sharded = mirrors, list(sharded)
        if sharded:
            self.options["shards"] = [each.handle for each in sharded]
        self.functions = [self._function(rank) for rank in range(size)]

    def _function(self, rank: int) -> Any:
        collectives = SimulatedCollectives(self.exchange, rank)
        graph, copies = self.concrete.graph, self.copies[rank]

        def step(numbers: tf.Tensor, *local: tf.Tensor) -> Any:
            batches = []
            for number, rows in enumerate(self._sizes):
                at, count = self.chunks(rows, self.size)[rank]
                batches.append(Batch(rows, count, at) if self.static else Batch(*tf.unstack(numbers[number])))
            return build_step(
                Program(graph),
                local,
                [Sharded(0, rows=(each,)) for each in self._batches],
                batches[0],
                collectives,
                further=batches[1:],
                report=self.reports[rank],
                captured=lambda outer: copies[id(outer)].handle if id(outer) in copies else outer,
                snapshots=self.snapshots[rank],
                mirrors=self._mirrors(rank),
                **self.options,
            )

        return tf.function(step, autograph=False, reduce_retracing=True)

    def _mirrors(self, rank: int) -> Mirrors | None:
        own, others = self.copies[rank], self.mirrors[rank]
        in_shards = [(id(each.handle), each) for each in self._sharded if id(each.handle) in others]
        mirrors = [Mirror(own[k].handle, others[k].handle, self.layout(v), v.dtype) for k, v in in_shards]
        return Mirrors(mirrors, self._offset) if mirrors else None

    def layout(self, variable: tf.Variable) -> Layout:
        return Layout(tuple(variable.shape), self.size)

    def together(self, variable: tf.Variable) -> np.ndarray:
        """Returns a sharded variable, put together from the ranks' chunks."""
        return np.concatenate(self.held(variable)).reshape(variable.shape)

    def held(self, variable: tf.Variable) -> list[np.ndarray]:
        """Returns a variable's value on each rank."""
        return [copies[id(variable.handle)].numpy() for copies in self.copies]

    def everything(self) -> list[np.ndarray]:
        """Returns the values of all ranks' variables, mirrors included."""
        return [each.numpy() for held in (*self.copies, *self.mirrors) for each in held.values()]

    def expected(self, *arguments: np.ndarray) -> list[np.ndarray]:
        """Returns the results of one process."""
        return [np.asarray(each) for each in tf.nest.flatten(self.concrete(*map(tf.constant, arguments)))]

    def __call__(self, *arguments: np.ndarray) -> list[list[np.ndarray]]:
        """Returns the outputs of each rank."""

        def run(rank: int) -> list[np.ndarray]:
            parts = [self.chunks(each.shape[0], self.size)[rank] for each in arguments]
            local = [tf.constant(each[first : first + mine]) for each, (first, mine) in zip(arguments, parts)]
            places = [self._batches.index(number) for number in range(len(self._sizes))]
            numbers = [[arguments[place].shape[0], *reversed(parts[place])] for place in places]
            return [np.asarray(each) for each in self.functions[rank](tf.constant(numbers, tf.int64), *local)]

        results = results_of(run, range(self.size))
        return [results[rank] for rank in range(self.size)]

    def check(self, *arguments: np.ndarray, steps: int = 1, tolerance: float = TOLERANCE) -> Simulation:
        """Compares outputs and variables of some steps with one process."""
        for _ in range(steps):
            expected = self.expected(*arguments)
            for rank, outputs in enumerate(self(*arguments)):
                gap = difference(outputs, expected, tolerance)
                assert gap is None, f"rank {rank} of {self.size}, {[len(each) for each in arguments]} rows: {gap}"
        parts = {id(each) for each in self.options.get("parts", ())}
        for variable in self.variables:
            held = self.held(variable)
            if id(variable.handle) in parts:
                held = [np.sum(held, axis=0)]
            elif any(variable is each for each in self._sharded):
                held = [self.together(variable)]
            assert all(each.tobytes() == held[0].tobytes() for each in held), f"{variable.name}: ranks differ"
            gap = difference(held[:1], [variable.numpy()], tolerance)
            assert gap is None, f"{variable.name}: {gap}"
        return self

    def gathers(self) -> list[str]:
        """Returns the reason for each of rank 0's gathers."""
        return [each.reason for each in self.reports[0].entries if each.kind == "gather"]

    def graph_of_rank_0(self, *arguments: np.ndarray) -> tf.Graph:
        local = [tf.constant(each[: self.chunks(each.shape[0], self.size)[0][1]]) for each in arguments]
        return self.functions[0].get_concrete_function(tf.zeros([len(self._sizes), 3], tf.int64), *local).graph
