"""What the cut knows of a type of operation: one `OpSpec`, in the sense of Shardy's sharding rules.

A spec names the axes of operands and results by labels, its *factors*; `...k, kn -> ...n` is a matrix product:

    lower case    a factor. If results have it, an operation built of a rank's shards along it gives that shard of the
                  result. If they lack it, it is reduced: each rank gives a part, which `OpSpec.combine` combines.
    upper case    an axis that must be replicated.
    "1"           an axis of extent 1. In an operand it is repeated along the factor that others have at its place.
    "*"           an axis that only results have; `Factors.new` is its extent.

From the spec follow how the operation is built of placed operands (propagation.py), the extents of its results, how
flat shards pass through it (sharding.py), and whether it is linear (own_statistics.py).
"""

from __future__ import annotations

import enum
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import ONE, Dim, complete
from keras_ddl.cut.extents import Dims, Extents, ResultExtents, certain, extents
from keras_ddl.cut.program import Node

LABELS = string.ascii_lowercase
NEW = "*"


@dataclass(frozen=True)
class ShapeOf:
    """An operand that holds the extents of a tensor with these labels: a rank gives it those of its shard."""

    labels: str


Operand = str | ShapeOf | None  # None: replicated, whatever its rank


@dataclass(frozen=True)
class Factors:
    """The labels of one operation.

    Attributes:
        new: the extent of the axis "*" of results; None: unknown.
        only_if_reshaped: results may lack more axes of extent 1; that is no matter where they are only reshaped.
        combine: how the parts of reduced factors combine, where it is not as `OpSpec.combine` says.
    """

    operands: Sequence[Operand]
    results: Sequence[str]
    new: Dim | None = None
    only_if_reshaped: bool = False
    combine: str | None = None


Condition = Callable[[Context, Node, int], bool]


@dataclass(frozen=True)
class Linear:
    """In which operands an operation is linear, and where parts of a sum therefore give parts of a sum.

    Attributes:
        at: operands in each of which it is linear: one may be a part while all others are replicated.
        together: it is linear in all operands together: all may be parts.
        adds: replicated operands may join parts as parts, where the sum is not to be made yet.
        moves: entries are moved and not computed with, so that parts of every combination stay such parts.
        when: what must hold besides for the parts' sum to be rounded as one sum is; given the context, the node and the
            operand (of `at`) that is a part.
    """

    at: tuple[int, ...] = ()
    together: bool = False
    adds: bool = False
    moves: bool = False
    when: Condition | None = None


class Kind(enum.Enum):
    """How the entries of results follow from those of operands."""

    FORWARD = "the results are the operands"
    ENTRYWISE = "each from the entries at its place, operands being broadcast"
    REDUCTION = "each from the entries of the first operand along some axes"
    OTHER = "otherwise"


@dataclass(frozen=True)
class Making:
    """What is to be built: the operands of this rank, and along which factor they are sharded (None: parts)."""

    tensors: list[tf.Tensor]
    factors: Factors
    label: str | None


FactorsOf = Callable[[Extents, Node], Factors | None]
Make = Callable[[Context, Node, Making], list[tf.Tensor]]


@dataclass(frozen=True)
class OpSpec:
    """What is known of a type of operation.

    Attributes:
        factors: gives the labels of one operation of the type; None: nothing is certain.
        combine: how the parts of reduced factors combine, as in ops.all_reduce; None: no factor may be reduced.
        linear, kind: see `Linear`, `Kind`.
        never_empty: the kernel fails on an empty tensor: a rank without rows gives it one row of zeros.
        make: builds the operation where it is not the same operation of shards.
    """

    factors: FactorsOf
    combine: str | None = None
    linear: Linear = Linear()
    kind: Kind = Kind.OTHER
    never_empty: bool = False
    make: Make | None = None


_specs: dict[str, OpSpec] = {}


def spec(
    *types: str,
    combine: str | None = None,
    linear: Linear = Linear(),
    kind: Kind = Kind.OTHER,
    never_empty: bool = False,
    make: Make | None = None,
) -> Callable[[FactorsOf], FactorsOf]:
    """Registers the spec of types of operations; decorates what gives their factors."""

    def register(factors: FactorsOf) -> FactorsOf:
        for each in types:
            assert each not in _specs, f"two specs for {each}"
            _specs[each] = OpSpec(factors, combine, linear, kind, never_empty, make)
        extents(*types)(extents_of)
        return factors

    return register


def spec_of(operation_type: str) -> OpSpec | None:
    """Returns the spec of a type of operation, or None."""
    return _specs.get(operation_type)


def specs() -> dict[str, OpSpec]:
    """Returns all specs by type of operation."""
    return _specs


def kind_of(node: Node) -> Kind:
    """Returns how an operation's results follow from its operands, as far as its spec says."""
    known = _specs.get(node.type)
    return known.kind if known is not None else Kind.OTHER


def extents_of(known: Extents, node: Node) -> ResultExtents:
    """Returns the extents of an operation's results: each factor has one extent in all operands."""
    if kind_of(node) is Kind.FORWARD:
        return [known.dims(each) for each in node.inputs]
    factors = _specs[node.type].factors(known, node)
    if factors is None or factors.only_if_reshaped:
        return [None] * len(node.outputs)
    sizes: dict[str, set[Dim]] = {}
    for value, labels in zip(node.inputs, factors.operands):
        if isinstance(labels, str):
            dims = known.dims(value)
            for label, extent in zip(labels, dims if dims is not None else ()):
                sizes.setdefault(label, set()).add(extent)
    for value, labels in zip(node.inputs, factors.operands):
        if isinstance(labels, ShapeOf):
            numbers = known.numbers(value)
            for label, extent in zip(labels.labels, numbers.entries if numbers is not None else ()):
                sizes[label] = {extent}
    return [[_extent(label, sizes, factors.new) for label in labels] for labels in factors.results]


def _extent(label: str, sizes: dict[str, set[Dim]], new: Dim | None) -> Dim | None:
    if label in ("1", NEW):
        return ONE if label == "1" else new
    candidates = {each for each in sizes.get(label, ()) if each != 1} or sizes.get(label, set())
    return next(iter(candidates)) if len(candidates) == 1 else certain(candidates)


def labels_of(dims: Dims | None, replicated: Sequence[int] = ()) -> str | None:
    """Returns a label for each axis, upper case for those that must be replicated; None where the rank is unknown."""
    if dims is None or len(dims) > len(LABELS):
        return None
    taken = {axis % len(dims) for axis in replicated}
    return "".join(each.upper() if axis in taken else each for axis, each in enumerate(LABELS[: len(dims)]))


def without(labels: str, axes: Sequence[int]) -> str:
    """Returns the labels of other axes."""
    return "".join(each for axis, each in enumerate(labels) if axis not in axes)


def broadcast_labels(shapes: Sequence[Dims | None]) -> tuple[list[str], str] | None:
    """Returns the labels of operands that are broadcast against each other, and of the result.

    Where an extent may be 1 or not the axis is replicated: only the global tensors tell.
    """
    known = complete(shapes)
    if known is None:
        return None
    rank = max(map(len, known))
    if rank > len(LABELS):
        return None
    result = ""
    extent: list[Dim] = []
    for axis, label in enumerate(LABELS[:rank]):
        here = {each[axis - rank] for each in known if len(each) >= rank - axis}
        large = {each for each in here if each != 1}
        result += label.upper() if len(large) > 1 else label
        extent.append(next(iter(large)) if large else ONE)
    operands = []
    for dims in known:
        skipped = rank - len(dims)
        pairs = [(each, extent[axis + skipped], result[axis + skipped]) for axis, each in enumerate(dims)]
        operands.append("".join("1" if each == 1 and whole != 1 else label for each, whole, label in pairs))
    return operands, result
