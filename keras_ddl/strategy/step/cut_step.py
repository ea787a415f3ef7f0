"""Traces a step as one process would, on the global batch, and builds this rank's part of its graph.

`Strategy.function` and Keras's steps (keras_step.py) share this module. While a step is traced, no strategy is active
and no part of Keras is changed, so the graph is that of one process; keras_ddl/cut builds the rank's graph from it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from keras_ddl import communicator, config, cut, device
from keras_ddl.communicator import comparison
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.rows import chunk
from keras_ddl.gradients import buckets
from keras_ddl.state.replicate import numbers_of, replicate
from keras_ddl.strategy import observing
from keras_ddl.strategy.agreement.equal_values import description
from keras_ddl.strategy.calls.tracing import as_one_graph, as_one_process, tracing_for
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards import gathered_slots, laid_out, sharded_slots
from keras_ddl.strategy.shards.sharded_slots import chunk_of_handle
from keras_ddl.strategy.step import building, notices, same_step
from keras_ddl.strategy.step.eager_copies import EagerCopies

ConcreteFunction: TypeAlias = tf.types.experimental.ConcreteFunction

ALONE = "1 rank: nothing moves between ranks."
_steps = itertools.count()
# Remedies for operations that keep their own state, by the beginning of their type.
_REMEDIES = {
    "Iterator": "Pass the batch to the step, not the iterator.",
    "Lookup": "Change the table outside of the step.",
    "Queue": "Use the queue outside of the step.",
    "": "Draw from keras.random with a SeedGenerator.",
}


class CutStep:
    """A step of the program, its traces, and the state to restore after a failed call.

    Args:
        name: the name of the step in messages.
        scope: prefix of the names of its collectives, equal on all ranks.
        job: the job whose ranks share the batch.
    """

    def __init__(self, name: str, scope: str, job: Job) -> None:
        self.name = name
        self.scope = scope
        self._job = job
        self._feedback = f"{scope}#{next(_steps)}"  # numbered, because another step may have the same name
        self.reports: list[cut.Report] = []
        self.traces = 0  # traces begun so far
        self.runs_eagerly = 0  # calls without a graph
        self._snapshots: list[cut.Snapshots] = []
        self._staging: dict[Hashable, tf.Tensor] = {}
        self.eager_copies = EagerCopies()
        self._has_failed = False
        self.rows_of_ranks = ""  # for messages: the part of a batch that only one rank has; "": none
        self._traced: list[ConcreteFunction] = []  # keeps alive what the ranks' graphs use
        self._programs: dict[int, cut.Program] = {}  # by id of the trace, if it may be cut again
        self._unrepeatable: dict[int, tuple[str, str] | None] = {}  # also by id of the trace
        self._trained: set[tuple[int, ...]] = set()  # shapes of the weights
        self._without_batch: dict[int, Callable[[], None] | None] = {}  # by id of the trace
        self._used: list[tf.Variable] = []
        self._known: set[Any] = set()  # references of variables that are already equal on all ranks

    @property
    def rank(self) -> int:
        return self._job.rank

    @property
    def size(self) -> int:
        return self._job.size

    @property
    def shards_further_batches(self) -> bool:
        """Whether batches of other sizes are also cut; else every rank computes them in full."""
        return self._job.mesh is None and self._job.settings.batch_statistics == "global"

    @property
    def _row_ranks(self) -> range:
        """The ranks that compute the same rows as this one: on a mesh all ranks of its model axis."""
        mesh = self._job.mesh
        return range(self.rank, self.rank + 1) if mesh is None else mesh.row_ranks()

    def tables(self) -> list[str]:
        """Returns a table of the collectives of each trace, under the step's name; equal tables appear once."""
        lost = self.rank_loss_note()
        texts = dict.fromkeys(report.text() for report in self.reports)
        return [f"{self.name}, one step:\n{text}\n{lost}" for text in texts]

    def repeat_obstacle(self) -> str | None:
        """Returns why other ranks cannot repeat this step after a loss (rule, received, remedy), or None."""
        if self.rows_of_ranks:
            return (
                "A step can be repeated after a rank is lost only if every rank can read the whole batch. Received: "
                f"{self.rows_of_ranks}, in {self.name}. Use fit or strategy.function, and give all ranks the same "
                "batches."
            )
        for concrete in self._traced:
            if id(concrete) not in self._unrepeatable:
                self._unrepeatable[id(concrete)] = cut.not_repeatable(concrete.graph)
            unrepeatable = self._unrepeatable[id(concrete)]
            if unrepeatable is not None:
                kind, line = unrepeatable
                return (
                    "A step can be repeated after a rank is lost only if it changes nothing but variables. Received: "
                    f"{kind}{f' ({line})' if line else ''} in {self.name}, which keeps a state of its own. "
                    + next(remedy for beginning, remedy in _REMEDIES.items() if kind.startswith(beginning))
                )
        return None

    def rank_loss_note(self) -> str:
        """Returns a line about the effect of a lost rank on this step."""
        reason = self.repeat_obstacle()
        if reason is not None:
            return f"when a rank is lost: the job ends. {reason}"
        if self._job.goes_on:
            form = "form a smaller mesh, and " if self._job.mesh is not None else ""
            return f"when a rank is lost: the others {form}repeat this step"
        return (
            "when a rank is lost: the job ends. If `keras-ddl run -np MIN:MAX` starts it, the other ranks repeat this "
            "step"
        )

    def restore(self) -> None:
        """Restores, after a failed run, the variables that it has written before its commit."""
        for each in self._snapshots:
            each.restore()
        self.eager_copies.undo()
        self._has_failed = True

    def complete(self) -> None:
        """Writes, after a failed run that other ranks have committed, the values that only this rank has computed."""
        for each in self._snapshots:
            each.complete()
        self.eager_copies.redo()

    def begin(self) -> None:
        """Forgets the leftovers of a failed run."""
        if self._has_failed:
            self._has_failed = False
            for each in self._snapshots:
                each.discard()
        self.eager_copies.forget()

    def forget_graphs(self) -> None:
        """Forgets the graphs for earlier ranks; keeps traces."""
        self._snapshots.clear()
        self._staging.clear()
        self._without_batch.clear()
        self.reports.clear()

    def optimization(self) -> AbstractContextManager[None]:
        """Returns the context for running this step's graphs, in which TensorFlow optimizes them for this device."""
        return tf_compat.optimized_once() if "CPU" in self._job.device else nullcontext()

    @property
    def committed(self) -> tf.Operation:
        """The commit of the last built step, after which its variables are written."""
        return self._snapshots[-1].committed

    def forget_traces(self) -> None:
        """Forgets all traces, so that the next call traces on all ranks."""
        self._known.clear()
        self._used.clear()
        self._programs.clear()
        self.reports.clear()

    def trace_digest(self, concrete: ConcreteFunction, variables: Iterable[tf.Variable]) -> tuple[bytes, bytes]:
        """Returns two digests: of the trace, and of the values that it reads besides variables. Equal for equal steps.

        variables: known to all ranks, in the same order.
        """
        places = {each.handle.ref(): place for place, each in enumerate(variables)}
        program = self.program_of(concrete)
        used = [places.get(outer.ref()) for _, outer in program.captured]
        traced = self._as_compared(concrete, program)
        return comparison.digest(repr(used).encode() + traced.digest_of_trace()), traced.digest_of_reads()

    def _as_compared(
        self, concrete: ConcreteFunction, program: cut.Program, owners: Sequence[Any] = ()
    ) -> same_step.TracedStep:
        return same_step.TracedStep(self.name, program, concrete.graph.structured_outputs, owners, self.rank)

    def keep_only(self, concrete: ConcreteFunction) -> list[tf.Variable]:
        """Forgets all traces except one that all ranks have. Returns the variables that must be equal on all ranks."""
        self.reports.clear()
        self._programs = {key: each for key, each in self._programs.items() if key == id(concrete)}
        self._traced, self._used, self._known, self._trained, self._unrepeatable = [], [], set(), set(), {}
        variables = self._not_known(concrete, [])
        self._remember(concrete, variables, [])
        return variables

    def trace(
        self,
        step: Callable[..., Any],
        specs: Sequence[Any],
        following: Sequence[tuple[Callable[..., Any], Sequence[Any]]] = (),
        *,
        parts: Callable[[], list[tf.Variable]] = list,
        owners: Sequence[Any] = (),
        is_alone: bool = False,
    ) -> ConcreteFunction:
        """Returns `step` as a concrete function of the global batch. COLLECTIVE.

        All ranks compare traces and the values read in them (same_step.py). Variables that no step has used before get
        rank 0's values, however the script made them.

        Args:
            following: steps, with their specs, that one process traces in the same graph.
            parts: called after tracing, returns the variables in which each rank stores its part of a sum.
            owners: see same_step.TracedStep.
            is_alone: other ranks do not trace it now, and its variables get their values later (`keep_only`).
        Cost: 64 bytes per rank, in one exchange. Every new variable and every captured value is read once.
        Raises: RankMismatchError: on every rank; the step then counts as not traced.
        """
        self.traces += 1
        with as_one_process(), tracing_for(self._job):
            function = tf.function(as_one_graph(step, following) if following else step, autograph=False)
            concrete = function.get_concrete_function(*specs)
        notices.refuse_collectives(self.name, self.rank, concrete)
        program, own = cut.Program(concrete.graph), parts()
        variables = self._not_known(concrete, own)
        if not is_alone:
            with tf.init_scope():
                self._agree(self._as_compared(concrete, program, owners), variables)
        self._remember(concrete, variables, own)
        self._programs[id(concrete)] = program
        return concrete

    def _agree(self, traced: same_step.TracedStep, variables: Sequence[tf.Variable]) -> None:
        """Makes sure that all ranks have traced the same step. COLLECTIVE."""
        numbers = numbers_of(sharded_slots.whole(variables))
        # One at a time, because reading a variable that was written by rows copies it.
        values = comparison.digest(description(each.read_value() for each in numbers))
        gathered = communicator.all_gather_object((traced.digest(), values), name=f"{self.scope}/traced")
        steps, values_of_ranks = zip(*gathered)
        if len(set(steps)) > 1:
            raise traced.explain(self.scope)
        if len(set(values_of_ranks)) > 1:
            replicate(numbers)
        gathered_slots.scatter_restored(gathered_slots.slots_in(variables))

    def _not_known(self, concrete: ConcreteFunction, parts: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Returns the variables that no earlier trace has used, in the same order on all ranks."""
        known = self._known.union(each.ref() for each in parts)
        return [each for each in variables_of(concrete) if each.ref() not in known]

    def _remember(
        self, concrete: ConcreteFunction, variables: Sequence[tf.Variable], parts: Sequence[tf.Variable]
    ) -> None:
        self._traced.append(concrete)
        self._trained.update(tuple(each.shape) for each in concrete.graph.trainable_variables)
        self._known.update(each.ref() for each in [*variables, *parts])
        self._used += variables

    def used_variables(self) -> list[tf.Variable]:
        """Returns the variables that its traces use, in the same order on all ranks."""
        return list(self._used)

    def program_of(self, concrete: ConcreteFunction) -> cut.Program:
        """Returns a traced step as a program to be cut."""
        program = self._programs.pop(id(concrete), None) or cut.Program(concrete.graph)
        if self._job.goes_on:
            self._programs[id(concrete)] = program
        return program

    def run_without_batch(self, concrete: ConcreteFunction) -> None:
        """Runs the part of a traced step that one process runs when the data ends before a batch is read."""
        if id(concrete) not in self._without_batch:
            self._without_batch[id(concrete)] = self._writes_without_batch(concrete)
        write = self._without_batch[id(concrete)]
        if write is not None:
            with as_one_process():
                write()

    def _writes_without_batch(self, concrete: ConcreteFunction) -> Callable[[], None] | None:
        scope, mesh = f"{self.scope}/end", self._job.mesh
        if mesh is None:
            offset = self._job.place_of(self.rank).batch.offset
            return cut.writes_without_batch(
                concrete.graph,
                cut.StepCollectives(scope, self.rank, self.size, self._plan),
                chunk_of=chunk_of_handle,
                has_mirror=lambda outer: bool(offset) and chunk_of_handle(outer) is not None,
            )
        axes = building.Axes.of(self._job, mesh, scope, self._plan)
        model_part = cut.cut_along_model(cut.Program(concrete.graph), axes.model, laid_out.local_part)
        self._traced.append(model_part.function)
        outers = [outer for outer, _ in concrete.graph.captures]
        return cut.writes_without_batch(
            model_part.function.graph,
            axes.data,
            chunk_of=building.chunks_of(outers),
            has_mirror=building.mirrored_slices(outers),
            earlier=axes.model,
            everyone=axes.everyone,
        )

    def build(
        self,
        program: cut.Program,
        local: Sequence[tf.Tensor],
        placements: Sequence[cut.Placement],
        batch: cut.Batch,
        report: cut.Report,
        *,
        begins_with: tf.Tensor | None = None,
        **options: Any,
    ) -> list[tf.Tensor]:
        """Builds this rank's part of a traced step in the graph that is being traced. Returns the complete outputs.

        Args:
            local: this rank's part of each argument, with placement.
            report: records the operations that are built.
            begins_with: the result of the all_gather that begins the step, which becomes the first collective of its
                plan.
            options: as `cut.build_step` takes them.
        """
        scope = f"{self.scope}/{cut.trace_digest(program).hex()[:8]}"  # different traces must not exchange data
        seed = zlib.crc32(f"{self._job.token}/{scope}".encode()) % 2**31
        self._snapshots.append(cut.Snapshots(self._staging))
        arguments = building.Local(local, placements, batch)
        options |= {"report": report, "seed": seed}
        mesh = self._job.mesh
        if mesh is not None:
            axes = building.Axes.of(self._job, mesh, scope, self._plan)
            if begins_with is not None:
                axes.everyone.begin_with(begins_with)
            outputs, model_rank_function = building.on_mesh(
                self._job, mesh, self.name, program, arguments, axes, self._snapshots[-1], options
            )
            self._traced.append(model_rank_function)
            for each in axes:
                each.follow_plan()
        else:
            collectives = cut.StepCollectives(
                scope,
                self.rank,
                self.size,
                self._plan,
                compression=self._job.settings.compression,
                weights=self._trained,
                feedback=self._feedback,
            )
            if begins_with is not None:
                collectives.begin_with(begins_with)
            outputs = building.along_batch(self._job, program, arguments, collectives, self._snapshots[-1], options)
            collectives.follow_plan()
        if self._job.size > 1 and report.is_alike_on_ranks:
            device.compute_alike(self._job.device)
        self.reports.append(report)
        self._show(report)
        observer = observing.observer()
        if observer is not None:
            observer.traced(self.name, program, report)
        report.forget_operations()
        return outputs

    def batch_without_rows(self) -> cut.Batch:
        """Returns the batch of a step whose arguments have no rows: one row, on the first data rank."""
        rank = self.rank if self._job.mesh is None else self._job.mesh.data.rank
        return cut.Batch(1, int(rank == 0), min(rank, 1))

    def batch_of_chunks(self, total: Any) -> cut.Batch:
        """Returns a batch whose rows `data.chunk` divides between the ranks."""
        ranks = self._row_ranks
        first, end = chunk(total, ranks[0], self.size)[0], chunk(total, ranks[-1], self.size)[1]
        return cut.Batch(total, end - first, first)

    def batch_of_counts(self, counts: Any, total: int | None = None) -> cut.Batch:
        """Returns a batch with given rows per rank: numbers, or a tensor ([ranks] int64) of the step's graph."""
        add = tf.reduce_sum if tf.is_tensor(counts) else sum
        ranks = self._row_ranks
        own = counts[self.rank] if len(ranks) == 1 else add(counts[ranks[0] : ranks[-1] + 1])
        return cut.Batch(add(counts) if total is None else total, own, add(counts[: ranks[0]]))

    def _plan(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        """Groups sums into buckets. `sizes`: bytes, in the order in which the sums become ready."""
        last = len(sizes) - 1
        bound = self._job.bucket_size.bound(sum(sizes))
        # `plan_buckets` expects the order of layers. Here gradients are in the order in which they become ready.
        plan = buckets.plan_buckets(list(sizes)[::-1], list(dtypes)[::-1], bucket_bytes=bound)
        return [[last - i for i in bucket] for bucket in plan]

    def warn_of_restarted_kernels(self, concrete: ConcreteFunction) -> None:
        """Calls `notices.warn_of_restarted_kernels` on rank 0."""
        if self.rank == 0:
            notices.warn_of_restarted_kernels(self.name, concrete)

    def _show(self, report: cut.Report) -> None:
        """Shows, on rank 0, the communication of a newly traced step."""
        if self.rank == 0:
            others = (each.text() for each in self.reports if each is not report)
            if config.get("EXPLAIN_STEP") and report.text() not in others:
                print(self.tables()[-1], flush=True)
            notices.warn_of_slow_parts(self.name, report)


def variables_of(concrete: ConcreteFunction) -> list[tf.Variable]:
    """Returns all variables that a traced step uses, whoever made them, in the same order on all ranks."""
    by_handle = {id(each.handle): each for each in concrete.graph.variables}  # the graph lists them in no fixed order
    return [by_handle[id(outer)] for outer, _ in concrete.graph.captures if id(outer) in by_handle]


class Outputs:
    """The outputs of a traced step: tensors, and the other values in its structure."""

    def __init__(self, concrete: ConcreteFunction) -> None:
        self._structure = concrete.graph.structured_outputs
        self._leaves = tf.nest.flatten(self._structure, expand_composites=True)

    def packed(self, tensors: Iterable[tf.Tensor]) -> Any:
        """Returns the step's result with these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if tf.is_tensor(each) else each for each in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)
