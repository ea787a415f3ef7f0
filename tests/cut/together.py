"""Builds a cut step for all ranks in one graph, which is quick for many small programs. Loops need simulated.py.

One thread per rank builds the rank's part, one thread at a time. At a collective a rank waits until all ranks have
given their values, which an ordinary sum or concatenation then combines. Nothing is compiled or optimized.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cut.simulated import OneBucket, chunks

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Batch, Program, Report, build_step
from keras_ddl.cut.analysis.placements import REPLICATED, Sharded
from keras_ddl.cut.values.collectives import PLAIN, Reduction

OPTIONS = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
OPTIONS.graph_options.rewrite_options.disable_meta_optimizer = True
OPTIONS.graph_options.optimizer_options.opt_level = -1
_COMBINE = {
    "sum": lambda parts: tf.reduce_sum(tf.stack(parts), 0),
    "max": lambda parts: tf.reduce_max(tf.stack(parts), 0),
    "min": lambda parts: tf.reduce_min(tf.stack(parts), 0),
    "product": lambda parts: tf.reduce_prod(tf.stack(parts), 0),
}


class Turns:
    """Lets ranks run one after the other, each until its next collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.error: BaseException | None = None
        self._condition = threading.Condition()
        self._turn = 0
        self._given: list[Any] = []
        self._found: Any = None

    def wait(self, rank: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == rank or self.error is not None)
            if self.error is not None:
                raise RuntimeError("another rank failed")

    def pass_on(self, rank: int) -> None:
        with self._condition:
            self._turn = (rank + 1) % self.size
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._condition:
            self.error = self.error or error
            self._condition.notify_all()

    def meet(self, rank: int, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        self._given.append((name, value))
        if rank == self.size - 1:
            given, self._given = self._given, []
            assert len({each for each, _ in given}) == 1, f"ranks make different collectives: {given}"
            with tf.control_dependencies(None):
                self._found = combine([each for _, each in given])
        self.pass_on(rank)
        self.wait(rank)
        return self._found


class Collectives(OneBucket):
    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self.rank, self.size = turns, rank, turns.size

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, how: Reduction = PLAIN) -> list[tf.Tensor]:
        def combine(given: list[Any]) -> list[Any]:
            return [_COMBINE[op](list(each)) for each in zip(*given)]

        return [tf.identity(each) for each in self._turns.meet(self.rank, name, tensors, combine)]

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tf.identity(self._turns.meet(self.rank, name, tensor, lambda given: tf.concat(given, 0)))


def in_turns(graph: tf.Graph, size: int, make: Callable[[int, Turns], None]) -> None:
    """Runs `make` for each rank in a separate thread, with `graph` as the default graph."""
    turns = Turns(size)
    graph.switch_to_thread_local()

    def run(rank: int) -> None:
        try:
            turns.wait(rank)
            with graph.as_default():
                make(rank, turns)
            turns.pass_on(rank)
        except BaseException as error:
            turns.fail(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if turns.error is not None:
        raise turns.error


def specs_of(arguments: Sequence[np.ndarray], static: bool, open_extents: bool = False) -> list[tf.TensorSpec]:
    """Returns the specs with which a batch is traced."""
    front = [arguments[0].shape[0] if static else None]
    backs = [[None] * (each.ndim - 1) if open_extents else each.shape[1:] for each in arguments]
    return [tf.TensorSpec([*front, *back], each.dtype) for each, back in zip(arguments, backs)]


class Together:
    """A step without variables on ranks that share one graph.

    Args:
        step: takes `arguments` and then `wholes`; returns tensors.
        arguments: an example batch with rows along axis 0, for shapes and dtypes.
        wholes: arguments that every rank holds completely.
        sizes: numbers of ranks to cut for.
        static: whether tracing sees the number of rows.
        open_extents: whether tracing sees no other extents of `arguments`.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: Sequence[np.ndarray],
        wholes: Sequence[np.ndarray] = (),
        *,
        sizes: Sequence[int] = (2, 3),
        static: bool = True,
        open_extents: bool = False,
    ) -> None:
        specs = specs_of(arguments, static, open_extents)
        specs += [tf.TensorSpec(each.shape, each.dtype) for each in wholes]
        traced = tf.function(step, autograph=False).get_concrete_function(*specs).graph
        self.graph, self.static, self.sizes = traced, static, tuple(sizes)
        self.types = {each.type for each in traced.get_operations()}
        self.reports = {size: [Report() for _ in range(size)] for size in sizes}
        self._whole = tf.compat.v1.Session(graph=traced, config=OPTIONS)
        self._cut = {size: self._make(size, arguments, wholes) for size in sizes}

    def _make(self, size: int, arguments: Sequence[np.ndarray], wholes: Sequence[np.ndarray]) -> Any:
        graph, rows = tf.Graph(), arguments[0].shape[0]
        outputs: list[Any] = [None] * size
        feeds: list[Any] = [None] * size
        placements = [Sharded(0)] * len(arguments) + [REPLICATED] * len(wholes)

        def make(rank: int, turns: Turns) -> None:
            first, count = chunks(rows, size)[rank]
            numbers = [tf.compat.v1.placeholder(tf.int64, []) for _ in range(3)]
            batch = Batch(rows, count, first) if self.static else Batch(*numbers)
            front = [count] if self.static else [None]
            local = [tf.compat.v1.placeholder(each.dtype, [*front, *each.shape[1:]]) for each in arguments]
            local += [tf.compat.v1.placeholder(each.dtype, each.shape) for each in wholes]
            feeds[rank] = [*numbers, *local]
            outputs[rank] = build_step(
                Program(self.graph),
                local,
                placements,
                batch,
                Collectives(turns, rank),
                report=self.reports[size][rank],
            )

        in_turns(graph, size, make)
        return tf.compat.v1.Session(graph=graph, config=OPTIONS), feeds, outputs

    def expected(self, arguments: Sequence[np.ndarray], wholes: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        """Returns the results of one process."""
        return self._whole.run(
            list(self.graph.outputs), dict(zip((each.name for each in self.graph.inputs), [*arguments, *wholes]))
        )

    def outputs(
        self, size: int, arguments: Sequence[np.ndarray], wholes: Sequence[np.ndarray] = ()
    ) -> list[list[np.ndarray]]:
        """Returns the outputs of each rank."""
        session, feeds, outputs = self._cut[size]
        rows = arguments[0].shape[0]
        given = {}
        for (first, mine), placeholders in zip(chunks(rows, size), feeds):
            local = [each[first : first + mine] for each in arguments]
            given.update(zip((each.name for each in placeholders), [rows, mine, first, *local, *wholes]))
        return session.run(outputs, given)

    def close(self) -> None:
        for each in (self._whole, *(session for session, _, _ in self._cut.values())):
            each.close()
