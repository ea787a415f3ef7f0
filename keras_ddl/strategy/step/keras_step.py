"""Steps of Keras (train_step, test_step, predict_step) on several ranks: what one process would compute.

Keras calls them through `Strategy.run`, with this rank's rows of the batch. In a graph the step is traced on the whole
batch and cut into ranks (cut_step.py). Run eagerly there is no graph to be cut: the rows of all ranks are gathered, and
every rank computes the step on all of them, which is right, and no faster than one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from keras_ddl import communicator, cut
from keras_ddl.communicator import stack_position
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.context import setting
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.data import notice, order
from keras_ddl.data.rows import BatchRows, gather_rows, row_count, static_rows
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.step.arguments import Arguments, is_tensor
from keras_ddl.strategy.step.batch_kinds import BatchKind
from keras_ddl.strategy.step.cut_step import CutStep, Outputs, batch_of_chunks, batch_of_counts, batch_without_rows
from keras_ddl.strategy.step.rows_trained import RowsTrained
from keras_ddl.strategy.step.tracing import as_one_process, is_traced

_STEPS = ("train_step", "test_step", "predict_step")
# Names of the exchange that begins a step. The timeline tells from them when the batch had arrived, and whether the
# step needs the counts before it can go on.
_NAME, _NAME_OF_NEEDED = "rows", "needed_rows"


UNKNOWN = BatchRows()
LOCAL = BatchRows(is_local=True)


@dataclass
class KerasCall:
    """A call of a step by Keras's trainer, which may trace it.

    Attributes:
        model, name: whose step it is, and which, whatever the program calls its function.
        rows: what is known of those of the batches. kind: of the batches.
        is_single: it is called with a batch, not with an iterator: then its kernels are others in one process as well.
        steps: that were traced in it.
    """

    model: Any
    name: str
    rows: BatchRows = UNKNOWN
    kind: BatchKind | None = None
    is_single: bool = False
    steps: int = 0

    def specs_of_step(self, tensors: int) -> Sequence[Any] | None:
        """Returns the types of the `tensors` tensors of the step that is traced now, as its kind has them, if known."""
        begin = self.steps * tensors
        if self.kind is None or tensors == 0 or len(self.kind.specs) % tensors:
            return None
        specs = self.kind.specs[begin : begin + tensors]
        return specs if len(specs) == tensors else None


_call: ContextVar[KerasCall | None] = ContextVar("keras_ddl_keras_call", default=None)


def calling(
    model: Any, name: str, rows: BatchRows, kind: BatchKind | None = None, *, is_single: bool = False
) -> AbstractContextManager[None]:
    """Returns the context in which Keras's trainer calls a step of `model` (see KerasCall).

    In it only Keras calls `Strategy.run`: the program's code runs as in one process (tracing.py).
    """
    return setting(_call, KerasCall(model, name, rows, kind, is_single))


def call_of(function: Any) -> KerasCall | None:
    """Returns which step of Keras it is that `Strategy.run` is to call; None: it is the program's own function."""
    call = _call.get()
    if call is not None and not is_traced():
        return call
    model, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    return KerasCall(model, name) if isinstance(model, keras_compat.Trainer) and name in _STEPS else None


class KerasSteps:
    """The steps of the models that train under a Strategy of several ranks."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._steps: weakref.WeakKeyDictionary[Any, dict[str, CutStep]] = weakref.WeakKeyDictionary()
        self._warned_of: set[str] = set()  # steps that run eagerly
        self.rows_trained = RowsTrained()  # on rank 0, which shows them
        notice.prepare()

    # In a tf.function of the program's own, autograph would convert the cut as well: half a minute for five layers.
    @do_not_convert
    def run(self, call: KerasCall, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a step with this rank's rows. COLLECTIVE. Returns: what one process would get."""
        if call.rows.is_local:
            with as_one_process():
                return function(*args, **kwargs)
        arguments = tf.nest.map_structure(_as_tensor, (args, kwargs))  # train_on_batch has arrays
        if tf.executing_eagerly():
            return self._run_on_all_rows(call, function, arguments)
        return self._run_cut(call, function, arguments)

    def steps_of(self, model: Any) -> list[CutStep]:
        """Returns the steps of `model` that were traced."""
        return list(self._steps.get(model, {}).values())

    def explain(self, model: Any) -> str:
        """See Strategy.explain."""
        tables = [table for step in self.steps_of(model) for table in step.tables()]
        if not tables:
            raise ConfigError(
                "Strategy.explain describes steps that have been traced. Received: model "
                f"{model.name!r}, of which none has been (rank {self._strategy.rank}). Call fit, evaluate or predict; "
                "with run_eagerly=True there is no graph of a step."
            )
        return "\n\n".join(tables)

    def step_of(self, model: Any, name: str) -> CutStep:
        """Returns the step of this name, which need not have been traced."""
        steps = self._steps.setdefault(model, {})
        if name not in steps:
            label = models.plain_name(model.name)
            steps[name] = CutStep(f"{type(model).__name__}.{name}", f"{label}/{name}", self._strategy)
        return steps[name]

    def _run_on_all_rows(self, call: KerasCall, function: Callable[..., Any], arguments: Any) -> Any:
        rank, step = self._strategy.rank, self.step_of(call.model, call.name)
        if rank == 0:
            self._warn_of_eager_step(step.name)
        rows, counts = row_count(arguments), None
        if rows is not None:
            counts, arguments, _ = order.exchange_step_header(rows, arguments, _NAME)
        leaves = [
            gather_rows(leaf, rank, name=f"{call.name}/batch_{place}") if is_tensor(leaf) and leaf.shape.rank else leaf
            for place, leaf in enumerate(tf.nest.flatten(arguments))
        ]
        args, kwargs = tf.nest.pack_sequence_as(arguments, leaves)
        step.copy_eagerly(models.written_by_steps(call.model))
        with as_one_process():
            outputs = function(*args, **kwargs)
        communicator.barrier(name=f"{step.scope}/commit")
        step.copy_eagerly([])
        if counts is not None and call.name == "train_step" and rank == 0:
            self.rows_trained.add(counts)
        return outputs

    def _warn_of_eager_step(self, name: str) -> None:
        if name not in self._warned_of:
            self._warned_of.add(name)
            stack_position.warn(
                f"{name} runs eagerly: every rank computes all rows of every batch, which is right and no faster than "
                "one process. Leave out run_eagerly=True to share the work."
            )

    def _run_cut(self, call: KerasCall, function: Callable[..., Any], structure: Any) -> Any:
        step, rows, report = self.step_of(call.model, call.name), call.rows, cut.Report()
        count, counts, begins_with = row_count(structure), None, None
        if count is None:  # nothing to share: every rank computes all of it
            batch = batch_without_rows(step.rank)
        else:
            is_known = rows.is_chunked and rows.total is not None
            name = _NAME if is_known else _NAME_OF_NEEDED
            counts, structure, begins_with = order.exchange_step_header(count, structure, name)
            report.gathered_counts(step.size * order.header_bytes())
            batch = (
                batch_of_chunks(rows.total, step.rank, step.size)
                if is_known
                else batch_of_counts(counts, step.rank, rows.total)
            )
        others = rows.of_others if rows.is_chunked else frozenset()
        arguments = Arguments(
            structure,
            has_rows=lambda place, leaf: bool(leaf.shape.rank) and place not in others,
            own_rows=True,
            gathers_others=True,
        )
        concrete = self._traced(call, step, function, arguments)
        local = arguments.gathered(_of_equal_rows(arguments, structure, count, step), step.rank, step.scope, report)
        is_rank0s = call.name == "predict_step" and self._strategy.gather_predictions == "rank0"
        outputs = step.build(
            cut.Program(concrete.graph),
            local,
            arguments.states,
            batch,
            report,
            begins_with=begins_with,
            keeps_rows=is_rank0s and step.rank != 0,
            parts=[each.handle for each in _accumulators(call)],
            tell=arguments.tell_rows,
        )
        if counts is not None and call.name == "train_step" and step.rank == 0:
            with tf.control_dependencies([step.committed]):
                self.rows_trained.add(counts)
        return Outputs(concrete).packed(outputs)

    def _traced(self, call: KerasCall, step: CutStep, function: Callable[..., Any], arguments: Arguments) -> Any:
        """Returns the step as traced for the kind of batches that it is called with, by an earlier call or now."""
        kind = call.kind
        specs = arguments.specs(call.rows.total)
        of_kind = call.specs_of_step(len(specs))
        if of_kind is None:
            kind = None
        else:
            specs = arguments.specs(call.rows.total, of_kind)
        concrete = None if kind is None else kind.traces.get(call.steps)
        if concrete is None:
            flat = arguments.components(arguments.shapes(specs))
            concrete = step.trace(arguments.bound(function, specs), flat, parts=lambda: _accumulators(call))
        if kind is not None:
            kind.traces[call.steps] = concrete
            graph = call.steps, call.is_single
            if graph in kind.built:
                step.warn_of_kernels_that_begin_anew(concrete)
            kind.built.add(graph)
            call.steps += 1
        return concrete


def _accumulators(call: KerasCall) -> list[tf.Variable]:
    """The variables in which each rank accumulates its part of gradients between updates."""
    return [each.value for each in models.accumulators_of(call.model)] if call.rows.accumulates_parts else []


def _as_tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if hasattr(leaf, "__array__") and not tf.is_tensor(leaf) else leaf


def _of_equal_rows(arguments: Arguments, structure: Any, rows: tf.Tensor | None, step: CutStep) -> list[tf.Tensor]:
    """Returns the components of a batch, the sharded ones with certainty of as many rows as the first has.

    Raises: ConfigError: one has not; where only the running step tells, TensorFlow's error with the same words.
    """
    leaves = tf.nest.flatten(structure)
    first = next((static_rows(leaf) for leaf in leaves if is_tensor(leaf) and leaf.shape.rank != 0), None)
    tensors = list(arguments.tensors)
    for place, component in arguments.sharded():
        mine = static_rows(tensors[component])
        rule = (
            "The tensors of a batch must all have the same number of rows; tensors with another number need a dataset "
            f"whose element_spec says so (drop_remainder=True). Received: component {place} of the batch of "
            f"{step.name} has another number of rows than the first (rank {step.rank})."
        )
        if mine is None or first is None:
            dynamic = tf.shape(tensors[component], out_type=tf.int64)[0]
            equal = tf.debugging.assert_equal(dynamic, rows, f"keras_ddl: {rule}")
            with tf.control_dependencies([equal]):
                tensors[component] = tf.identity(tensors[component])
        elif mine != first:
            raise ConfigError(rule)
    return tensors
