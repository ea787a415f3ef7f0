"""Runs Keras's train_step, test_step and predict_step on several ranks, with the results of one process.

Keras calls steps through `Strategy.run` with this rank's rows of the batch. In a graph the step is traced on the global
batch and cut (cut_step.py). An eager step has no graph to cut: the rows of all ranks are gathered, and every
rank computes the step on all of them, which is correct but no faster than one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import communicator, config, cut, device
from keras_ddl.communicator import comparison
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.communicator.step_names import COMMIT, NEEDED_ROWS, ROWS, argument
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.strategies import process_variable
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.data import order
from keras_ddl.data.rows import gather_rows, row_count
from keras_ddl.errors import ConfigError, RankMismatchError
from keras_ddl.strategy import accumulation
from keras_ddl.strategy.agreement.equal_values import description
from keras_ddl.strategy.calls import trainer_calls
from keras_ddl.strategy.calls.tracing import as_one_process, sees_global_batch
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards import laid_out
from keras_ddl.strategy.step.arguments import Arguments, is_tensor
from keras_ddl.strategy.step.component_rows import ComponentRows, arguments_by_component
from keras_ddl.strategy.step.cut_step import ConcreteFunction, CutStep, Outputs
from keras_ddl.strategy.step.execution import Execution

_STEPS = ("train_step", "test_step", "predict_step")


class RowsTrained:
    """The rows of all training steps of Keras since the process began.

    Cost: about 7 us of a core per step, if rows are counted.
    """

    def __init__(self) -> None:
        # Make it before the first step, because a tf.function that makes a variable is traced again.
        self._count = process_variable("rows_trained")

    def add(self, counts: tf.Tensor) -> None:
        """Counts the rows of the step that is being traced or run ([ranks] int64). No rank waits for this."""
        self._count.assign_add(tf.reduce_sum(counts))

    def __int__(self) -> int:
        return int(self._count.numpy())


def execution_of(function: Any) -> Execution | None:
    """Returns the execution that calls `Strategy.run(function)`; None: the function is not a Keras step.

    Keras calls `Strategy.run` in the innermost execution of this thread. If the program itself passes a step of a
    model, only the model and the step are known.
    """
    call = trainer_calls.innermost()
    if isinstance(call, Execution) and not sees_global_batch():
        return call
    model, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    return Execution(model, name) if isinstance(model, keras_compat.Trainer) and name in _STEPS else None


class KerasSteps:
    """The steps of models under a Strategy of several ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps: weakref.WeakKeyDictionary[Any, dict[str, CutStep]] = weakref.WeakKeyDictionary()
        self._warned_of: set[str] = set()  # names of eager steps already warned about
        self.rows_trained = RowsTrained()  # rank 0 shows them
        order.prepare()

    # Without this, autograph would also convert the cut in the program's own tf.function: 30 s for five layers.
    @do_not_convert
    def run(self, execution: Execution, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a step with this rank's rows. COLLECTIVE. Returns: the result of one process."""
        has_part = self._job.mesh is not None or self._job.shards_weights and self._job.size > 1
        if has_part and (execution.is_local or tf.executing_eagerly()):
            what = "predict_on_batch" if execution.is_local else "run_eagerly=True"
            why = "that a layout cuts" if self._job.mesh is not None else "in shards"
            raise ConfigError(
                f"A model with variables {why} can run only in traced steps, which keras_ddl divides between the "
                f"ranks. Received: {what} of {execution.model.name!r} (rank {self._job.rank}). Use fit, evaluate, "
                "predict or strategy.function, without run_eagerly."
            )
        if execution.is_local:
            with as_one_process():
                return function(*args, **kwargs)
        arguments = tf.nest.map_structure(_as_tensor, (args, kwargs))  # train_on_batch passes arrays
        if tf.executing_eagerly():
            return self._run_on_all_rows(execution, function, arguments)
        return self._run_cut(execution, function, arguments)

    def explain(self, model: Any) -> str:
        """Implements `Strategy.explain`."""
        tables = [table for step in self._steps.get(model, {}).values() for table in step.tables()]
        if not tables:
            raise ConfigError(
                f"Strategy.explain describes the traced steps of a model. Received: model {model.name!r}, which has "
                f"none yet (rank {self._job.rank}). Call fit, evaluate or predict first, without run_eagerly=True."
            )
        return "\n\n".join(tables)

    def step_of(self, model: Any, name: str) -> CutStep:
        """Returns the step with this name, traced or not."""
        steps = self._steps.setdefault(model, {})
        if name not in steps:
            label = plain_name(model.name)
            steps[name] = CutStep(f"{type(model).__name__}.{name}", f"{label}/{name}", self._job)
        return steps[name]

    def _run_on_all_rows(self, execution: Execution, function: Callable[..., Any], arguments: Any) -> Any:
        """Runs a step eagerly: gathers the rows of all ranks, and computes all of them on every rank. COLLECTIVE."""
        rank, step = self._job.rank, self.step_of(execution.model, execution.step)
        if rank == 0 and step.name not in self._warned_of:
            self._warned_of.add(step.name)
            stack_position.warn(
                f"{step.name} runs eagerly: every rank computes all rows of every batch. That is correct, but no "
                "faster than in one process. Leave out run_eagerly=True to share the work."
            )
        rows, counts = row_count(arguments, execution.rows.other_components), None
        if rows is not None:
            counts, arguments, _ = order.exchange_step_header(rows, arguments, ROWS)
        leaves = tf.nest.flatten(arguments)
        for place, leaf in enumerate(leaves):
            if is_tensor(leaf) and leaf.shape.rank:
                leaves[place] = gather_rows(leaf, rank, name=argument(execution.step, place))
        args, kwargs = tf.nest.pack_sequence_as(arguments, leaves)
        device.compute_alike(self._job.device)
        with step.eager_copies.taken(), as_one_process():
            outputs = function(*args, **kwargs)
        self._commit_eagerly(execution, step, outputs)
        step.eager_copies.forget()
        if counts is not None and execution.step == "train_step" and rank == 0:
            self.rows_trained.add(counts)
        return outputs

    def _commit_eagerly(self, execution: Execution, step: CutStep, outputs: Any) -> None:
        """Ends a step that has run eagerly.

        COLLECTIVE. In the first steps, and sometimes later, ranks compare the step's writes and results, because
        no graph shows what it read.

        Cost: a barrier; for a comparison, 32 bytes per rank and one read of each variable.
        """
        every = config.get("DATA_CHECK_BATCHES")
        number, step.runs_eagerly = step.runs_eagerly, step.runs_eagerly + 1
        if not every or not (number < order.FIRST or number % every == 0):
            communicator.barrier(name=f"{step.scope}/{COMMIT}")
            return
        tensors = [each for each in tf.nest.flatten(outputs, expand_composites=True) if tf.is_tensor(each)]
        parts = {"what it returns": description(each for each in tensors if each.dtype != tf.variant)}
        for each in models.written_by_steps(execution.model):
            parts[plain_name(each.path)] = description([tf.convert_to_tensor(each)])
        if comparison.is_equal(repr(parts).encode(), f"{step.scope}/compared"):
            return
        differing = comparison.differing([*parts.values()], f"{step.scope}/compared_parts")
        place, other = next(iter(differing.items()), (0, 0))
        raise RankMismatchError(
            f"{step.name}: in a step that runs eagerly, every rank computes the whole batch and must get the same "
            f"result. Received: {[*parts][place]} on rank {other} differs from rank 0's after the step (rank "
            f"{self._job.rank}). Seed all random numbers of the model, keep its state in weights, and build lookup "
            "tables from the same data on every rank."
        )

    def _run_cut(self, execution: Execution, function: Callable[..., Any], structure: Any) -> Any:
        """Traces a step on the global batch, and builds this rank's part of it. COLLECTIVE when it runs."""
        step, rows, report = self.step_of(execution.model, execution.step), execution.rows, cut.Report()
        count, counts, begins_with = row_count(structure, rows.other_components), None, None
        is_known = rows.is_chunked and rows.total is not None
        of_components = None
        if count is not None:
            name, of_components = ROWS if is_known else NEEDED_ROWS, ComponentRows(structure, count, rows, step)
            gathered, structure, begins_with = order.exchange_step_header(of_components.exchanged, structure, name)
            report.gathered_counts(step.size * order.header_bytes(gathered.shape[1]))
            counts = of_components.check(gathered)
        if count is None:  # nothing to divide, so every rank computes everything
            batch = step.batch_without_rows()
        elif is_known:
            batch = step.batch_of_chunks(rows.total)
        else:
            batch = step.batch_of_counts(counts, rows.total)
        arguments = arguments_by_component(structure, rows, step)
        concrete = self._traced(execution, step, function, arguments)
        further = [] if of_components is None else of_components.further_batches(arguments, concrete)
        local = arguments.gathered(arguments.tensors, step.rank, step.scope, report)
        is_rank0s = execution.step == "predict_step" and self._job.settings.gather_predictions == "rank0"
        outputs = step.build(
            step.program_of(concrete),
            local,
            arguments.placements,
            batch,
            report,
            begins_with=begins_with,
            keeps_rows=is_rank0s and step.rank != 0,
            parts=[each.handle for each in _accumulators(execution)],
            declare_rows=arguments.declare_rows,
            **({"further": further} if further else {}),
        )
        if counts is not None and execution.step == "train_step" and step.rank == 0:
            with tf.control_dependencies([step.committed]):
                self.rows_trained.add(counts)
        return Outputs(concrete).packed(outputs)

    def trace_alone(self, execution: Execution, function: Callable[..., Any], batch: Any) -> None:
        """Traces a step that takes one batch, before this rank joins the ranks that run it.

        batch: this rank's part, in a graph.
        """
        step = self.step_of(execution.model, execution.step)
        arguments = arguments_by_component(((batch,), {}), execution.rows, step)
        with execution.entered():
            self._traced(execution, step, function, arguments, is_alone=True)

    def _traced(
        self,
        execution: Execution,
        step: CutStep,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        is_alone: bool = False,
    ) -> ConcreteFunction:
        """Returns the traced step for the kind of batches of the execution. Traces it unless an earlier call has."""
        execution.begin_step()
        total = execution.rows.total
        of_kind = execution.specs_of_steps(len(arguments.specs(total)))
        kind = execution.kind if of_kind else None
        concrete = None if kind is None else kind.traces.get(execution.steps_traced)
        if concrete is None:
            laid_out.refuse_made_outside(self._job, execution.model.variables)

            def bound(of_batch: Sequence[Any] | None) -> tuple[Callable[..., Any], list[tf.TensorSpec]]:
                specs = arguments.specs(total, of_batch)
                return arguments.bound(function, specs), arguments.components(arguments.shapes(specs))

            following = [bound(specs) for specs in of_kind[1:]]
            concrete = step.trace(
                *bound(of_kind[0] if of_kind else None),
                following,
                parts=lambda: _accumulators(execution),
                owners=[execution.model],
                is_alone=is_alone,
            )
        execution.traces.append(concrete)
        if kind is not None:
            kind.traces[execution.steps_traced] = concrete
            graph = execution.steps_traced, execution.is_single
            if graph in kind.built:
                step.warn_of_restarted_kernels(concrete)
            kind.built.add(graph)
            execution.steps_traced += 1
        return concrete


def _accumulators(execution: Execution) -> list[tf.Variable]:
    """Returns the variables in which each rank accumulates its part of gradients between updates."""
    return (
        [each.value for each in accumulation.partial_accumulators(execution.model)]
        if execution.accumulates_parts
        else []
    )


def _as_tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if hasattr(leaf, "__array__") and not tf.is_tensor(leaf) else leaf
