"""A step traced as one process would trace it, on the global batch, and made again as one rank's part of it.

What `Strategy.function` and the steps of Keras (keras_step.py) share. No part of Keras is changed for it: while a step
is traced no strategy is active, so the graph is that of one process; keras_ddl/cut makes the rank's graph out of it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_ddl import config, cut, ops
from keras_ddl.communicator import stack_position
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.rows import chunk
from keras_ddl.errors import ConfigError
from keras_ddl.gradients import buckets
from keras_ddl.strategy.shards import gathered_slots, sharded_slots
from keras_ddl.strategy.step.tracing import as_one_process, tracing_for

ALONE = "1 rank: nothing moves between ranks."
_LARGE = 1 << 20  # bytes gathered in a step that are worth a warning
_steps = itertools.count()


class CutStep:
    """A step of the program: traces it, and makes this rank's graph of what was traced.

    Args:
        name: what messages call the step. scope: begins the names of its collectives, the same on all ranks.
        strategy: whose ranks share the batch.
    """

    def __init__(self, name: str, scope: str, strategy: Any) -> None:
        self.name = name
        self.scope = scope
        self.rank, self.size = strategy.rank, strategy.size
        self._strategy = strategy
        self._feedback = f"{scope}#{next(_steps)}"  # another step may have the same name
        self.reports: list[cut.Report] = []
        self.traces = 0  # begun
        self._snapshots: list[cut.Snapshots] = []
        self._copies: list[tuple[Any, tf.Tensor]] = []
        self._traced: list[Any] = []  # keeps what the ranks' graphs use alive
        self._without_batch: dict[int, Callable[[], None] | None] = {}  # by id of what was traced
        self.known: set[Any] = set()  # variables that are equal on all ranks already

    def explain(self) -> str:
        """Returns a table of the collectives of each trace: bytes, reason, and the line of the step."""
        if self.size == 1:
            return ALONE
        return "\n\n".join(report.text() for report in self.reports)

    def tables(self) -> list[str]:
        """Returns the same, one by one, each under the step's name."""
        return [f"{self.name}, one step:\n{report.text()}" for report in self.reports]

    def restore(self) -> None:
        """When a run of the step has failed: gives variables that it has written early back what they were."""
        for each in self._snapshots:
            each.restore()
        for variable, value in self._copies:
            variable.assign(value)
        self._copies = []

    def copy_eagerly(self, variables: Sequence[Any]) -> None:
        """Copies what a step that runs eagerly may write, until it has committed ([])."""
        self._copies = [(each, tf.identity(tf.convert_to_tensor(each))) for each in variables]

    @property
    def committed(self) -> tf.Operation:
        """The commit of the step that was built last, after which its variables are written."""
        return self._snapshots[-1].committed

    def _new_snapshots(self) -> cut.Snapshots:
        self._snapshots.append(cut.Snapshots())
        return self._snapshots[-1]

    def forget_traces(self) -> None:
        """Begins anew: the next call traces, on all ranks."""
        self.known.clear()
        self.reports.clear()

    def trace(
        self, step: Callable[..., Any], specs: Sequence[Any], parts: Callable[[], list[tf.Variable]] = list
    ) -> Any:
        """Returns `step` as a concrete function of the global batch. COLLECTIVE where it uses variables first.

        parts: gives, when the step has been traced, the variables of which each rank holds a part of a sum.
        """
        self.traces += 1
        with as_one_process(), tracing_for(self._strategy):
            concrete = tf.function(step, autograph=False).get_concrete_function(*specs)
        self._refuse_collectives(concrete)
        self._agree_on_variables(concrete, parts())
        self._traced.append(concrete)
        return concrete

    def run_without_batch(self, concrete: Any) -> None:
        """Does what one process does of a traced step whose batch never comes, because the data has ended."""
        if id(concrete) not in self._without_batch:
            collectives = cut.StepCollectives(f"{self.scope}/end", self.rank, self.size, self._plan)
            self._without_batch[id(concrete)] = cut.writes_without_batch(concrete.graph, collectives)
        write = self._without_batch[id(concrete)]
        if write is not None:
            with as_one_process():
                write()

    def build(
        self,
        program: cut.Program,
        local: Sequence[tf.Tensor],
        states: Sequence[cut.Placement],
        batch: cut.Batch,
        report: cut.Report,
        *,
        begins_with: tf.Tensor | None = None,
        **options: Any,
    ) -> list[tf.Tensor]:
        """Makes this rank's part of a traced step in the graph that is being traced; returns its outputs, complete.

        local: what this rank has of each argument, placed as `states` says. report: gets what is made. begins_with:
            what the all_gather that begins the step has gathered, which becomes the first of its plan. options: as
            `cut.build_step` takes them.
        """
        slots = {id(outer): sharded_slots.of_handle(outer) for _, outer in program.captured}
        scope = f"{self.scope}/{program.digest().hex()[:8]}"  # ranks that traced other steps do not meet
        trained = {tuple(each.shape) for concrete in self._traced for each in concrete.graph.trainable_variables}
        collectives = cut.StepCollectives(
            scope,
            self.rank,
            self.size,
            self._plan,
            compression=self._strategy.settings["compression"],
            weights=trained,
            feedback=self._feedback,
        )
        if begins_with is not None:
            collectives.begin_with(begins_with)
        seed = zlib.crc32(f"{self._strategy.job}/{scope}".encode()) % 2**31
        with tf.device(self._strategy.extended.device):
            outputs = cut.build_step(
                program,
                local,
                states,
                batch,
                collectives,
                report=report,
                seed=seed,
                batch_statistics=self._strategy.settings["batch_statistics"],
                captured=lambda outer: outer if (slot := slots[id(outer)]) is None else slot.chunk.handle,
                snapshots=self._new_snapshots(),
                shards=[outer for _, outer in program.captured if slots[id(outer)] is not None],
                **options,
            )
        collectives.follow_plan()
        self.reports.append(report)
        self._tell(report)
        return outputs

    def _plan(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        """Groups what is summed into buckets. `sizes`: bytes, in the order in which they become ready."""
        last = len(sizes) - 1
        bound = self._strategy.extended.bucket_size.bound(sum(sizes))
        # Gradients come in the order of their layers there, the last of which are ready first.
        plan = buckets.plan_buckets(list(sizes)[::-1], list(dtypes)[::-1], bucket_bytes=bound)
        return [[last - i for i in bucket] for bucket in plan]

    def warn_of_kernels_that_begin_anew(self, concrete: Any) -> None:
        """Warns where a step that was traced before is made into another graph of this rank, for batches that it
        holds in another way: kernels that remember what they have drawn are others there, and in one process the same.
        """
        drawing = next((each.name for each in _nodes(concrete) if "seed2" in each.attr), None)
        if drawing is not None and self.rank == 0:
            stack_position.warn(
                f"{self.name}: {drawing} keeps its random state in its kernel. This batch comes in a different form "
                "than earlier ones (say, a PyDataset after arrays), so the step was built again and that state "
                "restarted: its numbers are not those of one process. Draw with keras.random and a SeedGenerator, or "
                "pass all data in one form."
            )

    def _refuse_collectives(self, concrete: Any) -> None:
        own = next((each.op for each in _nodes(concrete) if each.op.startswith("Ddl")), None)
        if own is not None:
            raise ConfigError(
                f"{self.name}: this step sees the global batch, as one process does: there is nothing left to reduce "
                f"or gather in it. Received: {own} (rank {self.rank}). Leave the collective out, or use it in a loop "
                "of strategy.run."
            )

    def _agree_on_variables(self, concrete: Any, parts: list[tf.Variable]) -> None:
        """Gives rank 0's values to variables that this step uses first, however the script made them."""
        by_handle = {id(each.handle): each for each in concrete.graph.variables}  # in no order of their own
        used = [by_handle[id(outer)] for outer, _ in concrete.graph.captures if id(outer) in by_handle]
        self.known.update(each.ref() for each in parts)
        variables = [each for each in used if each.ref() not in self.known]
        self.known.update(each.ref() for each in variables)
        numeric = [each for each in variables if each.dtype not in (tf.string, tf.variant, tf.resource)]
        numeric = [each for each in numeric if sharded_slots.of(each) is None]
        with tf.init_scope():
            if numeric:
                ops.broadcast_variables(numeric, root=0)
            gathered_slots.agree(gathered_slots.slots_in(variables))

    def _tell(self, report: cut.Report) -> None:
        """Shows, on rank 0, what a step that was just traced moves."""
        if self.rank != 0:
            return
        if config.get("EXPLAIN_STEP"):
            print(self.tables()[-1], flush=True)
        for name, reason in report.kept_of_batch():
            stack_position.warn(
                f"{self.name}: {name} is {reason}, and is replicated: every rank computes all of it. That is correct, "
                "but no faster than in one process."
            )
        for each in report.large_gathers(_LARGE):
            open_size = f"at least {each.of_few_rows:,} bytes (of {cut.FEW_ROWS} rows)"
            size = open_size if each.bytes is None else f"{each.bytes:,} bytes"
            stack_position.warn(
                f"{self.name}: {size} are gathered in each step, because {each.reason}"
                + (f" ({each.line})" if each.line else "")
                + ". That is correct, but slower than necessary."
            )


class Outputs:
    """The outputs of a traced step: tensors, and what in its structure is none."""

    def __init__(self, concrete: Any) -> None:
        self._structure = concrete.graph.structured_outputs
        self._leaves = tf.nest.flatten(self._structure, expand_composites=True)

    def packed(self, tensors: Iterable[tf.Tensor]) -> Any:
        """Returns what the step returns, with these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if tf.is_tensor(each) else each for each in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)


def batch_without_rows(rank: int) -> cut.Batch:
    """Returns the batch of a step whose arguments have no rows, as one row of rank 0's."""
    return cut.Batch(1, int(rank == 0), min(rank, 1))


def batch_of_chunks(total: Any, rank: int, size: int) -> cut.Batch:
    """Returns a batch of which each rank has the rows that `data.chunk` says."""
    first, end = chunk(total, rank, size)
    return cut.Batch(total, end - first, first)


def batch_of_counts(counts: Any, rank: int, total: int | None = None) -> cut.Batch:
    """Returns a batch of which each rank has so many rows: numbers or a tensor ([ranks] int64) of the step's graph."""
    add = tf.reduce_sum if tf.is_tensor(counts) else sum
    return cut.Batch(add(counts) if total is None else total, counts[rank], add(counts[:rank]))


def _nodes(concrete: Any) -> list[Any]:
    """Returns the nodes of a traced step, those of the functions that it calls included."""
    traced = concrete.graph.as_graph_def()
    return [*traced.node, *(node for function in traced.library.function for node in function.node_def)]
