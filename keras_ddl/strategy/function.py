"""`Strategy.function`: runs your own training step on any number of ranks with the result of one process.

The step is traced as in one process, on the global batch, and keras_ddl/cut splits its graph between the
ranks. This changes no part of Keras.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_ddl import communicator, config, cut, ops
from keras_ddl.communicator import comparison
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.data import order
from keras_ddl.data.rows import rows_of
from keras_ddl.errors import ConfigError, RankMismatchError
from keras_ddl.state.replicate import numbers_of
from keras_ddl.strategy import figures, observing
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.calls.tracing import sees_global_batch
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.step import garbage
from keras_ddl.strategy.step.arguments import Arguments, is_tensor
from keras_ddl.strategy.step.batch_kinds import BatchKinds
from keras_ddl.strategy.step.cut_step import ALONE, ConcreteFunction, CutStep, Outputs, variables_of
from keras_ddl.strategy.step.failing_together import Caller


class StepFunction(Caller):
    """The result of `Strategy.function`, which documents it."""

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        batches: str,
        reduce_retracing: bool,
        strategy: BaseStrategy,
        number: int,
    ) -> None:
        self.__wrapped__ = step
        self._strategy = strategy
        self._of_objects: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self.__name__ = getattr(step, "__name__", type(step).__name__)
        self._function = (
            step
            if isinstance(step, tf.types.experimental.PolymorphicFunction)
            else tf.function(step, reduce_retracing=reduce_retracing)
        )
        self._reduce_retracing = reduce_retracing
        self._batches = batches
        self._scope = f"{self.__name__}_{number}"
        super().__init__(CutStep(self.__name__, self._scope, strategy.job))
        if batches == "rank":
            self.cut_step.rows_of_ranks = "batches='rank', with each rank's own rows"
        self._calls = 0
        self._rows = 0.0  # rows of all ranks in the last call, for monitoring
        self._traced: dict[Hashable, _Traced] = {}
        self._kinds: dict[Hashable, BatchKinds] = {}  # kinds of arguments whose extents may be left open
        self._epoch = strategy.job.epoch

    @property
    def rank(self) -> int:
        return self.cut_step.rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step. COLLECTIVE. Returns: the result of one process, on every rank."""
        used: list[Any] = []
        if sees_global_batch() or not tf.executing_eagerly():
            return self._run(args, kwargs, used)
        observer, job_figures = observing.observer(), figures.current()
        if observer is not None:
            observer.begin_step(self.__name__, None)
        if job_figures is not None:
            job_figures.begin_step()
        returned = self._run(args, kwargs, used)
        if job_figures is not None:
            if self.cut_step.size == 1:
                self._rows = float(next(filter(None, map(rows_of, tf.nest.flatten((args, kwargs)))), 0.0))
            job_figures.rows += self._rows
            if job_figures.end_step():
                job_figures.write()
        if observer is not None:
            if self.cut_step.size == 1:
                used = variables_of(self._function.get_concrete_function(*args, **kwargs))
            observer.end_step(self.__name__, None, numbers_of(used), returned)
        return returned

    def _run(self, args: Any, kwargs: Any, used: list[Any]) -> Any:
        """Runs the step, and puts the variables that it uses on several ranks into `used`."""
        if self.cut_step.size == 1 or sees_global_batch():  # called within another step
            return self._function(*args, **kwargs)
        if not tf.executing_eagerly():
            raise ConfigError(
                f"{self.__name__}: a step of Strategy.function is itself a tf.function, and must be called outside of "
                f"other tf.functions. Received: a call while another function is traced (rank {self.rank}). Remove "
                "the tf.function around it, or replace it with strategy.function."
            )
        self._calls += 1  # counted on all ranks, even if the call fails

        def call() -> Any:
            if self.cut_step.size == 1:
                return self._function(*args, **kwargs)
            if self._epoch != self._strategy.job.epoch:  # the ranks have changed: rebuild, but keep the traces
                self._epoch = self._strategy.job.epoch
                self.cut_step.forget_graphs()
                for each in self._traced.values():
                    each.forget_graph()
            return self.together(lambda: self._call(args, kwargs, used))

        return self._strategy.resilience.call(call, lambda: used, self)

    def _call(self, args: Any, kwargs: Any, used: list[Any]) -> Any:
        structure = tf.nest.map_structure(_as_tensor, (args, kwargs))
        leaves = [leaf for leaf in tf.nest.flatten(structure) if is_tensor(leaf)]
        rows: int | None = next((rows for rows in map(rows_of, leaves) if rows is not None), None)
        arguments = Arguments(
            structure,
            has_rows=lambda _, leaf: rows is not None and rows_of(leaf) == rows,
            own_rows=self._batches == "rank",
        )
        self._compare(arguments)
        traced = self._find(arguments, rows)
        used[:] = traced.variables
        self._rows = float(sum(traced.batch.counts) if self._batches == "rank" else rows or 0)
        with ops.translate_errors(), self.cut_step.optimization():
            return traced(arguments.tensors)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the step as a method of `instance`. It is traced separately for each object, as by tf.function."""
        if instance is None:
            return self
        key = id(instance)  # objects that compare by fields have no hash
        if key not in self._of_objects:
            reference = weakref.ref(instance, lambda _: self._of_objects.pop(key, None))
            step = _method(self.__wrapped__, instance, reference)
            self._of_objects[key] = (
                reference,
                self._strategy.function(step, batches=self._batches, reduce_retracing=self._reduce_retracing),
            )
        return self._of_objects[key][1]

    def forget_traces(self) -> None:
        super().forget_traces()
        self._traced.clear()
        self._kinds.clear()

    def explain(self) -> str:
        """Returns a table of the collectives of each trace: bytes, reason, and the line of the step."""
        if self.cut_step.size == 1:
            return ALONE
        lost = self.cut_step.rank_loss_note()
        return "\n\n".join(f"{report.text()}\n{lost}" for report in self.cut_step.reports)

    def _compare(self, arguments: Arguments) -> None:
        """Checks that all ranks pass the same arguments, as often as DATA_CHECK_BATCHES says."""
        call, every = self._calls - 1, config.get("DATA_CHECK_BATCHES")
        if not every or not (call < order.FIRST or call % every == 0):
            return
        compared: Any = [(each.dtype.name, each.shape.as_list()) for each in arguments.tensors]
        if self._batches == "global":
            compared = [compared, order.digest(arguments.tensors).numpy().tolist()]
        else:
            values = order.digest(arguments.replicated()).numpy().tolist()
            compared = [arguments.types, [(name, shape[1:] if shape else shape) for name, shape in compared], values]
        same = "the same global batch"
        if self._batches == "rank":
            same = (
                "tensors of the same dtypes and shapes, apart from the number of rows, and with equal values in "
                "tensors that are not part of the batch"
            )
        comparison.require_equal(
            compared,
            f"{self._scope}/arguments",
            f"{self.__name__}: all ranks must call a step with {same}.",
            "Read the same data in the same order on every rank. If each rank has its own rows, use "
            'strategy.function(step, batches="rank"). To let rank 0 read for all, take the rows from '
            'strategy.experimental_distribute_dataset under keras_ddl.Strategy(reader="rank0").',
            received=lambda _, __, other: f"in call {call} rank {other}'s arguments differ from rank 0's",
        )

    def _find(self, arguments: Arguments, rows: int | None) -> _Traced:
        """Returns the trace for arguments with `rows` rows on this rank."""
        key = arguments.key(_constant)
        if self._reduce_retracing:
            return self._find_open(key, arguments, rows)
        counts: tuple[int, ...] = ()
        if self._batches == "rank" and rows is not None:  # the trace depends on the row counts of all ranks
            counts = tuple(communicator.all_gather_object(rows, name=f"{self._scope}/rows"))
        specs = arguments.specs(sum(counts) if counts else rows)
        batch = _TracedBatch(tuple(arguments.shapes(specs)), rows, counts)
        key = (key, batch)
        if key not in self._traced:
            self._traced[key] = self._trace(arguments, specs, batch)
        return self._traced[key]

    def _find_open(self, key: Hashable, arguments: Arguments, rows: int | None) -> _Traced:
        """Finds a trace for the global batch as tf.function(reduce_retracing=True) does.

        If each rank passes its own rows, the first trace already leaves their number open, so that calls need not
        exchange it.
        """
        specs = arguments.specs(None if self._batches == "rank" else rows)
        kind = self._kinds.setdefault(key, BatchKinds()).of(specs)
        key = (key, kind)
        if key not in self._traced:
            shapes = tuple(arguments.shapes(kind.specs))
            self._traced[key] = self._trace(arguments, kind.specs, _TracedBatch(shapes))
        return self._traced[key]

    def _trace(self, arguments: Arguments, specs: Sequence[Any], batch: _TracedBatch) -> _Traced:
        step = arguments.bound(self._function, specs)
        with garbage.paused():
            try:
                concrete = self.cut_step.trace(step, arguments.components(batch.shapes), owners=[self.__wrapped__])
            except RankMismatchError:  # later calls must not find the refused trace
                self._function = tf_compat.clone_function(self._function, self._function.python_function)
                raise
        return _Traced(self, concrete, arguments.without_tensors(), batch)

    def build(
        self, program: cut.Program, arguments: Arguments, batch: _TracedBatch, local: list[tf.Tensor]
    ) -> list[Any]:
        """Builds this rank's part of a traced step. local: the rank's arguments in the graph that is being traced."""
        report = cut.Report()
        rows = arguments.rows_in(local) if batch.rows is None else batch.rows
        return self.cut_step.build(
            program,
            arguments.gathered(local, self.rank, self._scope, report),
            arguments.placements,
            self._batch(rows, batch.counts, report),
            report,
            inputs_are_whole=self._batches == "global",
            declare_rows=arguments.declare_rows,
        )

    def _batch(self, rows: Any, counts: tuple[int, ...], report: cut.Report) -> cut.Batch:
        if rows is None:
            return self.cut_step.batch_without_rows()
        if self._batches == "global":
            return self.cut_step.batch_of_chunks(rows)
        if counts:
            return self.cut_step.batch_of_counts(counts)
        mine = tf.reshape(tf.cast(rows, tf.int64), [1])
        report.gathered_counts(self.cut_step.size * tf.int64.size)
        return self.cut_step.batch_of_counts(ops.all_gather(mine, name=f"{self._scope}/rows"))


class _TracedBatch(NamedTuple):
    """The batches that a trace accepts: shapes of components and, if known, the rows of this rank and of every rank."""

    shapes: tuple[tuple[int | None, ...], ...]
    rows: int | None = None
    counts: tuple[int, ...] = ()


class _Traced:
    """The step, traced for arguments of one kind.

    Attributes:
        batch: the batches that the trace accepts.
        variables: variables that the step uses, in the same order on all ranks.
    """

    def __init__(
        self, owner: StepFunction, concrete: ConcreteFunction, arguments: Arguments, batch: _TracedBatch
    ) -> None:
        self.batch = batch
        self._owner, self._arguments, self._concrete = weakref.proxy(owner), arguments, concrete
        self.variables = variables_of(concrete)
        self._slots = gathered_slots.slots_in(self.variables)
        self._name = owner.__name__
        self._outputs = Outputs(concrete)
        self._run: ConcreteFunction | None = self._built()

    def _built(self) -> ConcreteFunction:
        """Builds this rank's part of the traced step."""
        owner, arguments, batch = self._owner, self._arguments, self.batch
        program = owner.cut_step.program_of(self._concrete)
        local = list(batch.shapes)
        if batch.counts:
            for _, component in arguments.sharded():
                local[component] = (batch.counts[owner.rank], *local[component][1:])
        specs = [tf.TensorSpec(shape, each.dtype) for shape, each in zip(local, self._concrete.inputs)]

        @do_not_convert
        def rank_step(*local: tf.Tensor) -> list[tf.Tensor]:
            return owner.build(program, arguments, batch, list(local))

        with garbage.paused():
            return tf.function(rank_step, autograph=False).get_concrete_function(*specs)

    def forget_graph(self) -> None:
        """Makes the next call rebuild this rank's part."""
        self._run = None

    def __call__(self, tensors: list[tf.Tensor]) -> Any:
        gathered_slots.check_not_gathered(self._name, lambda: self._slots)
        if self._run is None:
            self._run = self._built()
        return self._outputs.packed(tf.nest.flatten(self._run(*tensors)))


def _method(step: Any, instance: Any, reference: weakref.ref[Any]) -> Callable[..., Any]:
    """Returns `step` bound to the object `instance`, without keeping the object alive."""
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return step.__get__(instance, type(instance))

    def method(*args: Any, **kwargs: Any) -> Any:
        return step(reference(), *args, **kwargs)

    method.__name__ = getattr(step, "__name__", "method")
    return method


def _as_tensor(leaf: Any) -> Any:
    """Converts arrays to tensors, which are arguments of the traced step. Anything else is a constant of the trace."""
    return tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf


def _constant(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, (int, float, str, bytes, bool, type(None))) else ("object", id(leaf))
