"""What a cut step moves between ranks, and why: for people who want to know where time goes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from keras_ddl.communicator.stack_position import user_line
from keras_ddl.cut.program import Node, Value


@dataclass
class Entry:
    """One collective. `bytes`: None where the extents are not known before the step runs."""

    kind: str  # "gather" or the op of a reduction
    bytes: int | None
    values: list[str]
    reason: str
    line: str


@dataclass
class Report:
    """Collectives in the order in which they were made, and operations that were computed whole for want of a rule."""

    entries: list[Entry] = field(default_factory=list)
    whole: dict[str, int] = field(default_factory=dict)
    program: bytes = b""  # digest of the step that was traced
    own_statistics: int = 0  # calls of BatchNormalization with the statistics of the rank's rows
    statistics_left: int = 0  # calls that could not be

    def digest(self) -> bytes:
        """Returns what must be the same on all ranks: the traced step, and the collectives in their order."""
        moved = [(each.kind, each.bytes, len(each.values), each.reason) for each in self.entries]
        return hashlib.sha256(self.program + repr((moved, self.own_statistics)).encode()).digest()

    def text(self) -> str:
        """Returns a table of the collectives of a step."""
        lines = [f"{'collective':<12}{'bytes':>14}  {'tensors':>7}  for"]
        for each in self.entries:
            size = "by the batch" if each.bytes is None else f"{each.bytes:,}"
            where = f" ({each.line})" if each.line else ""
            lines.append(f"{each.kind:<12}{size:>14}  {len(each.values):>7}  {each.reason}{where}")
        known = sum(each.bytes or 0 for each in self.entries)
        lines.append(f"{len(self.entries)} collectives a step, {known:,} bytes and what depends on the batch")
        if self.own_statistics or self.statistics_left:
            lines.append(
                f"BatchNormalization by each rank's own rows: {self.own_statistics} calls; by the whole batch, for "
                f"want of certainty: {self.statistics_left}"
            )
        if self.whole:
            kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(self.whole.items()))
            lines.append(f"computed whole on every rank, for want of a rule: {kinds}")
        return "\n".join(lines)

    def large_gathers(self, bytes_: int) -> list[Entry]:
        """Returns what is gathered though a rank has but rows of it, above so many bytes."""
        return [each for each in self.entries if each.kind == "gather" and (each.bytes or 0) > bytes_]

    def found_statistics(self, own: int, left: int) -> None:
        """Of so many calls of BatchNormalization each rank takes its own statistics, of others not."""
        self.own_statistics, self.statistics_left = own, left

    def gathered(self, value: Value, reader: Node | None) -> None:
        """A value's rows were gathered because `reader` needs all of them."""
        reason = "is a result" if reader is None else f"{reader.type} needs all rows"
        self.entries.append(Entry("gather", bytes_of(value), [value.key], reason, line_of(reader or value.node)))

    def reduced(self, op: str, values: Sequence[Value], readers: Sequence[Node | None]) -> None:
        """Values were combined in one collective."""
        sizes = [bytes_of(value) for value in values]
        total = None if any(each is None for each in sizes) else sum(sizes)
        kinds = sorted({"results" if each is None else each.type for each in readers})
        self.entries.append(
            Entry(op, total, [v.key for v in values], "for " + ", ".join(kinds), line_of(values[0].node))
        )

    def computed_whole(self, node: Node, inputs: Sequence[Value]) -> None:
        """An operation without a rule for inputs of which a rank holds its rows."""
        if inputs:
            self.whole[node.type] = self.whole.get(node.type, 0) + 1

    def add(self, other: Report) -> None:
        """Adds what was made in a branch or a loop's body."""
        self.entries += other.entries
        for each, count in other.whole.items():
            self.whole[each] = self.whole.get(each, 0) + count


def bytes_of(value: Value) -> int | None:
    """Returns the bytes of the whole tensor if they are known now."""
    count = value.shape.num_elements() if value.rank is not None else None
    return None if count is None else count * value.dtype.size


def line_of(node: Node) -> str:
    """Returns where the program made an operation: "train.py:12"; "" if it is not known."""
    return user_line(node.operation.traceback) or ""
