"""The train_function, test_function and predict_function of a model on several ranks.

Keras's loops call such a function for each execution of one or more steps. The function finds or makes the `Execution`
for the given batches, and runs it. An Execution wraps Keras's own function, which calls `Strategy.run` for each step.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat.datasets import continued
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import arrays, notice
from keras_ddl.data.rows import (
    UNKNOWN,
    BatchRows,
    component_rows,
    counts_of_ranks,
    global_batch,
    row_totals_and_outliers,
    take_chunk,
)
from keras_ddl.errors import RankMismatchError
from keras_ddl.strategy import accumulation
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.calls import fits, trainer_calls
from keras_ddl.strategy.keras_patches import reading
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.step import garbage
from keras_ddl.strategy.step.batch_kinds import BatchKind, BatchKinds, iterator_for_all, trace_for_all
from keras_ddl.strategy.step.execution import Execution
from keras_ddl.strategy.step.failing_together import Caller, CommonTrace

_ENDED, _FAILED = "ended", "failed"  # sent instead of the first batch's rows
_OWN_DATA = "data that each rank reads separately"
_OWN_BATCH = "train_on_batch or test_on_batch, to which each rank passes its own rows"


class _KerasFunction(Caller):
    """The executions of one step of a model: "train_step" | "test_step" | "predict_step"."""

    def __init__(self, model: Any, step: str, strategy: BaseStrategy) -> None:
        super().__init__(strategy.keras_steps.step_of(model, step))
        self._model, self._step, self._job = model, step, strategy.job
        self._resilience, self._epoch = strategy.resilience, strategy.job.epoch
        self._kinds = BatchKinds()
        self._executions: dict[Any, Execution] = {}
        self._has_executed = False  # whether this call has executed, and so may have traced
        self._executed: list[Execution] = []  # executions that this call has run

    def _call(self, run: Callable[[], Any], rows_of_ranks: str = "") -> Any:
        """Calls `run` on all ranks together, and again if ranks are lost and the job can continue.

        rows_of_ranks: the part of the batch that only one rank has.
        """
        self.cut_step.rows_of_ranks = rows_of_ranks
        executed = list[Execution]()  # a new list per call, because other ranks may ask for it during the next call

        def call() -> Any:
            executed.clear()
            self._executed = executed
            if self._epoch != self._job.epoch:  # the ranks have changed: cut again, but keep the traces
                self._epoch = self._job.epoch
                self._forget_executions()
                self._kinds.rebuild()
                self.cut_step.forget_graphs()
            return self.together(run)

        def written() -> list[Any]:
            return [*(each for execution in executed for each in execution.written()), *notice.variables()]

        try:
            return self._resilience.call(call, written, self)
        finally:
            self._executed = []

    def _own_rows(self, batch: Any) -> Any:
        return tf.nest.map_structure(lambda leaf: take_chunk(leaf, self._job.rank, self._job.size), batch)

    def _execution(self, kind: BatchKind, rows: BatchRows, **options: bool) -> Execution:
        rows = rows.for_kind(kind.specs)
        key = (kind, rows, *options.items())
        if key not in self._executions:
            self._executions[key] = Execution(self._model, self._step, rows, kind, **options)
        return self._executions[key]

    def _execute(self, execution: Execution, data: Any) -> Any:
        self._has_executed = True
        self._executed[:] = [execution]
        with self.cut_step.optimization():
            return execution.run(data, self._make_function)

    def _make_function(self, execution: Execution, data: Any) -> Callable[[Any], Any]:
        raise NotImplementedError

    def may_have_traced(self, is_python: bool) -> bool:
        return super().may_have_traced(is_python) or is_python and (self._has_executed or not self._kinds)

    def _forget_executions(self) -> None:
        self._executions.clear()

    def forget_traces(self) -> None:
        super().forget_traces()
        self._kinds.clear()
        self._forget_executions()


class IteratorFunction(_KerasFunction):
    """A train_function or test_function, which executes steps on an iterator of batches.

    Args:
        program_step: the function that Keras passes to `Strategy.run`.
        make: Keras's `_make_function`.
    """

    def __init__(self, model: Any, program_step: Any, strategy: BaseStrategy, make: Callable[..., Any]) -> None:
        super().__init__(model, name_of_step(model, program_step), strategy)
        self._program_step, self._make = program_step, make
        # Iterator -> its execution, and an iterator of the execution's types (None: the iterator itself).
        self._by_iterator: weakref.WeakKeyDictionary[Any, tuple[Execution, Any]] = weakref.WeakKeyDictionary()

    def __call__(self, iterator: Any) -> Any:
        """Executes steps. COLLECTIVE. iterator: a tf.data.Iterator, or a generator of one batch in train_on_batch."""
        if self._step == "train_step" and fits.is_outermost(self._model):
            self._resilience.joining.between_steps(self)
        try:
            if not isinstance(iterator, tf.data.Iterator):
                return self._call(lambda: self._run(iterator), _OWN_BATCH)
            if (rows := reading.rows_of(iterator)).is_global:
                return self._execute_kept(iterator, rows)
            return self._call(lambda: self._run(iterator), "" if rows.all_can_read else _OWN_DATA)
        except tf.errors.OutOfRangeError:
            self.cut_step.restore()
            self._run_without_batch(iterator)
            raise

    def _execute_kept(self, iterator: tf.data.Iterator, rows: BatchRows) -> Any:
        """Executes steps on global batches.

        Each batch is kept until its step has ended, because the step may run again on other rows.
        """
        returned = None
        for number in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if number:  # Keras's execution also ends early here
                    break
                kind = self._kinds.of(rows.spec)
                if self._model.steps_per_execution == 1 and not self._model.run_eagerly and 0 in kind.traces:
                    self.cut_step.run_without_batch(kind.traces[0])
                raise

            if self._step == "train_step":
                self._resilience.joining.check_batch(tf.nest.flatten(batch))
            if rows.may_differ:
                rows = reading.learn_rows(iterator, [component_rows(batch)])

            def run(batch: Any = batch, rows: BatchRows = rows) -> Any:
                self._has_executed = False
                if iterator not in self._by_iterator:
                    execution = self._execution(self._kinds.of(rows.spec), rows, is_single=True)
                    self._by_iterator[iterator] = execution, None
                return self._execute(self._by_iterator[iterator][0], self._own_rows(batch))

            returned = self._call(run)
        return returned

    def trace_ahead(self, rows: BatchRows) -> None:
        if rows.spec is None or self._model.run_eagerly:
            return
        kind = self._kinds.of(rows.spec)
        execution = self._execution(kind, rows, is_single=True)
        steps = self._model.distribute_strategy.keras_steps

        def trace(batch: Any) -> None:
            steps.trace_alone(execution, self._program_step, batch)

        with self.cut_step.optimization(), garbage.paused():
            trace_for_all(tf.function(trace, autograph=False), rows.spec, kind)

    def common_trace(self) -> CommonTrace | None:
        kind = self._kinds.only_trace()
        return None if kind is None else CommonTrace(kind.traces[0], f"{kind.structure} {kind.specs}")

    def _run(self, iterator: Any) -> Any:
        self._has_executed = False
        if self._step != "test_step":
            gathered_slots.check_not_gathered(self._step, lambda: gathered_slots.slots_of(self._model))
        if isinstance(iterator, tf.data.Iterator):
            return self._execute(*self._execution_on(iterator))
        batch = next(iterator)
        arrays.warn_of_equal_batches(batch, self._job.rank)
        totals, others = row_totals_and_outliers(counts_of_ranks(batch), batch)
        kind = self._kinds.of(global_batch(batch, totals))
        return self._execute(self._execution(kind, dataclasses.replace(UNKNOWN, others=others), is_single=True), batch)

    def _execution_on(self, iterator: tf.data.Iterator) -> tuple[Execution, tf.data.Iterator]:
        in_parts = self._step == "train_step" and fits.of(self._model) is not None and self._job.accumulates_parts
        if in_parts:
            accumulation.begin_step(self._model, self._job.rank)
        if iterator not in self._by_iterator:
            spec, rows = iterator.element_spec, reading.rows_of(iterator)
            looked_into = None
            if rows.may_differ:
                looked_into, rows = self._looked_into(iterator, rows)
            kind = self._kinds.of(global_batch(spec, rows.total) if rows.spec is None else rows.spec)
            execution = self._execution(kind, rows, accumulates_parts=in_parts)
            own_rows = execution.rows.rows_of_rank(len(tf.nest.flatten(spec)), self._job.rank, self._job.size)
            typed = iterator_for_all(iterator, kind, own_rows)
            self._by_iterator[iterator] = execution, None if typed is iterator else typed
            if looked_into is not None:  # once; then `iterator` continues after the first batch
                return execution, iterator_for_all(looked_into, kind, own_rows)
        execution, typed = self._by_iterator[iterator]
        return execution, iterator if typed is None else typed

    def _looked_into(self, iterator: tf.data.Iterator, rows: BatchRows) -> tuple[tf.data.Iterator | None, BatchRows]:
        """Reads the first batch to learn its rows. Returns an iterator that still yields it, and the rows. COLLECTIVE.

        Raises: RankMismatchError, on all ranks: the data of some ranks has ended.
        """
        first: Any = None
        failure: Exception | None = None
        rows_or_end: list[int | None] | str = _ENDED
        try:
            first = next(iterator)
            rows_or_end = component_rows(first)
        except StopIteration:
            pass
        except Exception as error:
            failure, rows_or_end = error, _FAILED
        rows_by_rank = communicator.all_gather_object(rows_or_end, name="keras_ddl/first_batch/rows")
        if failure is not None:  # the other ranks will fail in the step
            raise failure
        ended = [rank for rank, each in enumerate(rows_by_rank) if each == _ENDED]
        if ended and len(ended) < len(rows_by_rank) and _FAILED not in rows_by_rank:
            raise RankMismatchError(
                f"All ranks must have the same number of batches. Received: no batch on rank(s) {ended}, but at "
                f"least one on the other ranks (rank {self._job.rank}). Give every rank the same data."
            )
        counts = [each for each in rows_by_rank if isinstance(each, list)]
        if rows_or_end == _ENDED:  # the step will meet the end of the data, too
            return None, rows
        return continued(first, iterator), reading.learn_rows(iterator, counts)

    def _make_function(self, execution: Execution, batch: Any) -> Callable[[Any], Any]:
        if not execution.is_single:
            return self._make(self._model, self._program_step)
        # Like Keras's function of one batch, but traced for any number of rows.
        if self._model.run_eagerly:
            return self._run_single
        function = tf.function(self._run_single, reduce_retracing=True, autograph=False)
        if execution.kind is not None:
            trace_for_all(function, batch, execution.kind)
        return function

    def _run_single(self, batch: Any) -> Any:
        return self._model.distribute_strategy.run(self._program_step, args=(batch,))

    def _run_without_batch(self, iterator: Any) -> None:
        """Runs the part of the step's graph that one process runs before it finds that the data has ended."""
        if iterator in self._by_iterator and self._model.steps_per_execution == 1 and not self._model.run_eagerly:
            kind = self._by_iterator[iterator][0].kind
            if kind is not None and 0 in kind.traces:
                self.cut_step.run_without_batch(kind.traces[0])

    def _forget_executions(self) -> None:
        super()._forget_executions()
        self._by_iterator.clear()


class PredictFunction(_KerasFunction):
    """A predict_function, which executes steps on a list of batches. `make`: Keras's `make_predict_function`."""

    def __init__(self, model: Any, strategy: BaseStrategy, make: Callable[..., Any]) -> None:
        super().__init__(model, "predict_step", strategy)
        self._make = make
        self._local = Execution(model, "predict_step", is_local=True)

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Executes steps. COLLECTIVE in `predict`; in `predict_on_batch` the step runs on this rank alone."""
        loop = trainer_calls.innermost()
        if not isinstance(loop, trainer_calls.Loop) or loop.method != "predict" or loop.model is not self._model:
            return self._execute(self._local, batches)
        rows = loop.iterator.batch_rows
        if rows.is_global:
            return self._call(lambda: self._run(rows, self._own_rows(batches)))
        return self._call(lambda: self._run(rows, batches), "" if rows.all_can_read else _OWN_DATA)

    def _run(self, rows: BatchRows, batches: Sequence[Any]) -> Any:
        self._has_executed = False
        if rows.total is None or rows.spec is None:
            if rows.total is None:
                counts = [counts_of_ranks(each) for each in batches]
                specs = [
                    global_batch(each, row_totals_and_outliers(of_each, each)[0])
                    for each, of_each in zip(batches, counts)
                ]
                rows = rows.learn(counts[0])
            else:
                specs = [global_batch(each, rows.total) for each in batches]
        else:
            specs = [rows.spec] * len(batches)
        return self._execute(self._execution(self._kinds.of(specs), rows), batches)

    def _make_function(self, execution: Execution, batches: Sequence[Any]) -> Callable[[Any], Any]:
        try:
            self._make(self._model, force=True)
            function: Callable[[Any], Any] = self._model.predict_function
        finally:
            self._model.predict_function = self
        if execution.kind is not None:
            trace_for_all(function, batches, execution.kind)
        return function


def name_of_step(model: Any, function: Any) -> str:
    """Returns the name of a step's method, given the function, even if the program has replaced the method."""
    for name in ("train_step", "test_step"):
        if function == getattr(model, name):  # bound methods are equal but not identical
            return name
    return "test_step" if getattr(function, "__name__", "") == "test_step" else "train_step"
