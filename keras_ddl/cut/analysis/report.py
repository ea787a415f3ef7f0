"""Reports the communication of a cut step and its reasons, for `explain()`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from keras_ddl.communicator.reporting.stack_position import user_line
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.analysis.work import FEW_ROWS

FROM_RANK_0 = "from rank 0"  # results of host functions

_PURPOSES = {
    "reduce_scatter": ("in shards for", "the next step"),
    "all_gather": ("of shards for", "the next step"),
}


@dataclass
class Entry:
    """Collectives with one reason. `bytes`: None if extents are not known before the step runs."""

    kind: str  # "gather", the op of a reduction, "all_to_all", "mirror", or FROM_RANK_0
    bytes: int | None
    values: list[str]
    reason: str
    line: str
    count: int = 1  # number of collectives
    is_intentional: bool = False  # moves the fewest bytes possible, so no rule is missing
    few_rows_bytes: int = 0  # bytes with FEW_ROWS rows, if `bytes` is None


@dataclass
class Report:
    """Collectives in the order in which they were made, and operations that were replicated for lack of a rule."""

    entries: list[Entry] = field(default_factory=list)
    replicated: Counter[str] = field(default_factory=Counter)  # types of operations
    # Operations in `replicated`, and operations in `kept` that depend on the batch, for observers of the trace.
    replicated_operations: list[tf.Operation] = field(default_factory=list)
    kept: dict[tuple[str, str], bool] = field(default_factory=dict)  # see `keeps`
    own_statistics: int = 0  # calls of BatchNormalization with the statistics of the rank's rows
    global_statistics: int = 0  # calls that use the statistics of the global batch
    commits: bool = False  # whether a further collective ends the step; see commit/writes.py
    copies: Counter[str] = field(default_factory=Counter)  # why variables are copied before they are written
    lasting: Counter[str] = field(default_factory=Counter)  # types of operations that a failed step does not undo
    axis: str = ""  # the axis of a mesh along which these collectives run
    earlier: Report | None = None  # report of the axis along which the step was cut before
    _intended: dict[int, str] = field(default_factory=dict)  # why nodes, by position, are replicated on purpose

    def text(self) -> str:
        """Returns a table of the collectives of a step; on a mesh one for each axis."""
        lines = [] if self.earlier is None else [self.earlier.text(), ""]
        lines += [f"along the {self.axis}"] if self.axis else []
        lines += [f"{'collective':<14}{'bytes':>14}  {'tensors':>7}  reason"]
        for each in self.entries:
            unknown = "not known" if each.kind == FROM_RANK_0 else "varies"
            size = unknown if each.bytes is None else f"{each.bytes:,}"
            where = f" ({each.line})" if each.line else ""
            lines.append(f"{each.kind:<14}{size:>14}  {len(each.values):>7}  {each.reason}{where}")
        count = sum(each.count for each in self.entries)
        known = sum(each.bytes or 0 for each in self.entries)
        rest = ", plus sizes known only when it runs" if any(each.bytes is None for each in self.entries) else ""
        lines.append(f"{count} collectives per step, {known:,} bytes{rest}")
        if self.own_statistics or self.global_statistics:
            lines.append(
                f"BatchNormalization with each rank's own rows: {self.own_statistics} calls; with the global batch, "
                f"because using its own rows could not be proved safe: {self.global_statistics}"
            )
        if self.replicated:
            lines.append(f"replicated on every rank, for lack of a rule: {_counted(self.replicated)}")
        for name, reason in self.kept:
            lines.append(f"replicated on every rank, because it is {reason}: {name}")
        if self.commits:
            lines.append(
                "then a commit of 4 bytes: ranks write variables only after all of them have run everything above"
            )
        for why, count in sorted(self.copies.items()):
            lines.append(f"copied before it is written, in case a rank fails: {count} variables ({why})")
        if self.lasting:
            lines.append(f"not undone when a rank fails: {_counted(self.lasting)}")
        return "\n".join(lines)

    @property
    def is_alike_on_ranks(self) -> bool:
        """Whether each rank computes something from the whole batch, which must then be equal in every bit."""
        return self.earlier is not None or bool(self.replicated) or bool(self.kept_of_batch())

    def large_gathers(self, bytes_: int) -> list[Entry]:
        """Returns the gathers above this number of bytes that a missing rule causes, except gathers of results."""
        result = (each for each in self.entries if each.kind == "gather" and not each.is_intentional)
        return [each for each in result if (each.few_rows_bytes if each.bytes is None else each.bytes) > bytes_]

    def kept_of_batch(self) -> list[tuple[str, str]]:
        """Returns (operation, reason) for operations on the batch's entries that were built unchanged."""
        return [each for each, of_batch in self.kept.items() if of_batch]

    def intends_gather(self, node: Node, why: str) -> None:
        """Records that the rule of `node` gathers its operands because there is no cheaper way."""
        self._intended[node.position] = why

    def gathered(self, value: Value, reader: Node | None) -> None:
        """Records that a value's shards were gathered because `reader` needs all rows."""
        why = self._intended.get(reader.position) if reader is not None else None
        reason = "is a result" if reader is None else f"{reader.type} needs all rows"
        entry = Entry("gather", bytes_of(value), [value.key], why or reason, line_of(reader or value.node))
        entry.is_intentional = why is not None or reader is None
        entry.few_rows_bytes = _bytes_of_few_rows(value)
        self.entries.append(entry)

    def bucketed(
        self, kind: str, values: Sequence[Value], readers: Sequence[Node | None], compressed: bool = False
    ) -> None:
        """Records that values were combined in one collective; `compressed`: rounded to 16 bits between hosts.

        kind: the op of a reduction, "reduce_scatter" into flat shards, or "all_gather" of flat shards.
        """
        purpose, results = _PURPOSES.get(kind, ("for", "results"))
        kinds = sorted({results if each is None else each.type for each in readers})
        reason = f"{purpose} {', '.join(kinds)}" + (", 16 bits between hosts" if compressed else "")
        self.entries.append(Entry(kind, bytes_of(*values), [v.key for v in values], reason, line_of(values[0].node)))

    def gathered_weight(self, value: Value, reader: Node | None, *, is_again: bool) -> None:
        """Records that a weight in shards was gathered for operations that need all of it at this place of the step."""
        kind = "results" if reader is None else reader.type
        why = self._intended.get(reader.position) if reader is not None else None
        reason = f"of a weight's shards {'again, ' if is_again else ''}for {kind}" + (f", {why}" if why else "")
        self.entries.append(Entry("all_gather", bytes_of(value), [value.key], reason, line_of(reader or value.node)))

    def moved_rows(
        self, nodes: Sequence[Node], values: Sequence[Value], bytes_: int | None, tables: Sequence[int], count: int
    ) -> None:
        """Records that rows of tables in shards moved between ranks and the rows' owners, so that the tables did not.

        values: the rows, or the indices by which they were looked up, for `nodes`.
        bytes_: an upper bound of the bytes that moved.
        tables: the different sizes of the tables, in bytes; none: indices moved, not rows.
        count: number of collectives.
        """
        sizes = " or ".join(f"{each:,}" for each in tables)
        what = f"rows of tables of {sizes} bytes" if tables else "indices of rows"
        reason = f"{what} for {', '.join(sorted({each.type for each in nodes}))}"
        self.entries.append(Entry("all_to_all", bytes_, [v.key for v in values], reason, line_of(nodes[0]), count))

    def gathered_rows(self, node: Node, indices: Value, bytes_: int, table: int) -> None:
        """Records that all ranks got rows of a table in shards. `bytes_`: of a row; `table`: of the table."""
        known = indices.shape.num_elements() if indices.shape.is_fully_defined() else None
        reason = f"rows of a table of {table:,} bytes, which all ranks need, for {node.type}"
        size = None if known is None else known * bytes_
        self.entries.append(Entry("all_gather", size, [indices.key], reason, line_of(node)))

    def mirrored(self, bytes_: int, count: int) -> None:
        """Records that each rank sent new values of `count` shards to their mirrors, in one collective."""
        reason = "of shards, kept on another rank in case this rank is lost"
        self.entries.append(Entry("mirror", bytes_, ["shard"] * count, reason, ""))

    def keeps(self, node: Node, reason: str, of_batch: bool) -> None:
        """Records that an operation is built unchanged because it is `reason`. `of_batch`: depends on the batch."""
        line = line_of(node)
        key = node.type + (f" ({line})" if line else ""), reason
        self.kept[key] = self.kept.get(key, False) or of_batch
        if of_batch:
            self.replicated_operations.append(node.operation)

    def from_rank_0(self, node: Node, count: int, why: str = "is called by rank 0 alone") -> None:
        """Records that rank 0 sent results in `count` messages to all ranks, which lack them or have others."""
        values = [value.key for value in node.outputs]
        reason = f"{node.type} {why}"
        self.entries.append(Entry(FROM_RANK_0, bytes_of(*node.outputs), values, reason, line_of(node), count))

    def gathered_argument(self, kind: str, tensors: int = 1) -> None:
        """Records that an argument of several tensors was gathered from all ranks."""
        self.entries.append(Entry("gather", None, [kind] * tensors, f"is a {kind} argument", "", tensors))

    def gathered_counts(self, bytes_: int) -> None:
        """Records that the ranks exchanged how many rows each has."""
        self.entries.append(Entry("gather", bytes_, ["rows"], "is the number of rows of each rank", ""))

    def replicated_op(self, node: Node, sharded: Sequence[Value]) -> None:
        """Records that an operation was built from replicated operands, for lack of a rule for its sharded operands."""
        if sharded and node.position not in self._intended:
            self.replicated[node.type] += 1
            self.replicated_operations.append(node.operation)

    def add(self, other: Report) -> None:
        """Adds the report of a branch or a loop's body."""
        self.entries += other.entries
        for name, of_batch in other.kept.items():
            self.kept[name] = self.kept.get(name, False) or of_batch
        self.replicated += other.replicated
        self.replicated_operations += other.replicated_operations

    def forget_operations(self) -> None:
        """Drops references to the traced graph after the step is built, because a report lives as long as the step."""
        self.replicated_operations.clear()
        if self.earlier is not None:
            self.earlier.forget_operations()


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))


def bytes_of(*values: Value) -> int | None:
    """Returns the bytes of global tensors if they are known now. Sizes of lists and strings are never known."""
    total = 0
    for value in values:
        if not value.shape.is_fully_defined() or value.dtype in (tf.variant, tf.resource, tf.string):
            return None
        total += value.shape.num_elements() * value.dtype.size
    return total


def _bytes_of_few_rows(value: Value) -> int:
    """Returns a tensor's bytes if its first unknown extent were FEW_ROWS and all others 1."""
    if value.rank is None or value.dtype in (tf.variant, tf.resource, tf.string):
        return 0
    extents = value.shape.as_list()
    unknown = [axis for axis, each in enumerate(extents) if each is None]
    known: int = math.prod(each for each in extents if each is not None) * value.dtype.size
    return known * FEW_ROWS if unknown else known


def line_of(node: Node) -> str:
    """Returns where the program made an operation: "train.py:12"; "" if it is not known."""
    return user_line(node.traced.traceback) or ""
