"""Describes a type of operation by an `OpSpec`, like one of Shardy's sharding rules.

A spec names each axis of operands and results by a label. Axes with the same label belong to one *factor*, as in
einsum: `...k, kn -> ...n` is a matrix product. The labels are:

    lower case    a factor. If the results have it, an operation on a rank's shards along it gives the rank's shard of
                  the result. If they lack it, it is reduced: each rank gives a part, and `OpSpec.combine` says how to
                  combine the parts.
    upper case    an axis that must be replicated.
    "1"           an axis of extent 1. In an operand it is repeated along the factor that others have at its place.
    "*"           an axis that only results have; `Factors.new` is its extent.

The spec determines how the operation is built from placed operands (propagation.py), the extents of its results, how
flat shards pass through it (sharding.py), and whether it is linear (batch_statistics/).
"""

from __future__ import annotations

import enum
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import ONE, Dim, Uncertain, if_certain
from keras_ddl.cut.analysis.extents import Dims, Extents, ResultExtents, broadcast_extent, extents
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations.context import Context

LABELS = string.ascii_lowercase
HALF = (tf.float16, tf.bfloat16)
NEW = "*"


@dataclass(frozen=True)
class ShapeOf:
    """An operand that holds the extents of a tensor with these labels. A rank passes the extents of its own shard."""

    labels: str


Operand = str | ShapeOf | None  # None: replicated, of any rank


@dataclass(frozen=True)
class Factors:
    """The labels of one operation.

    Attributes:
        new: the extent of the axis "*" of results; None: unknown.
        only_if_reshaped: whether it is uncertain which axes of extent 1 the results lack. This does not matter if only
            Reshape operations read them.
        combine: how parts of reduced factors are combined, if not as `OpSpec.combine` says.
    """

    operands: Sequence[Operand]
    results: Sequence[str]
    new: Dim | None = None
    only_if_reshaped: bool = False
    combine: str | None = None


Condition = Callable[[Context, Node, int], bool]


@dataclass(frozen=True)
class Linear:
    """The operands in which an operation is linear, so that parts of a sum give parts of a sum.

    Attributes:
        at: operands in each of which the operation is linear: one of them may be a part while all others are
            replicated.
        together: whether it is linear in all operands together, so that all of them may be parts.
        adds: whether a replicated operand may be turned into a part and added to the other parts, if their sum has not
            been made yet.
        moves: whether it only moves entries, so that parts stay parts, however they are combined.
        when: returns whether the sum of parts is rounded like one sum, given the context, the node and the number of
            the operand in `at` that is a part; None: it always is.
    """

    at: tuple[int, ...] = ()
    together: bool = False
    adds: bool = False
    moves: bool = False
    when: Condition | None = None


class Kind(enum.Enum):
    """The way in which entries of results depend on entries of operands."""

    FORWARD = "the results are the operands"
    ENTRYWISE = "an entry depends on the operands' entries at its place; operands are broadcast"
    REDUCTION = "an entry depends on the first operand's entries along some axes"
    OTHER = "otherwise"


@dataclass(frozen=True)
class LocalOperands:
    """The operands of an operation on this rank.

    label: the factor along which they are sharded; None: they are parts of sums.
    """

    tensors: list[tf.Tensor]
    factors: Factors
    label: str | None


FactorsOf = Callable[[Extents, Node], Factors]  # raises Uncertain
Make = Callable[[Context, Node, LocalOperands], list[tf.Tensor]]


@dataclass(frozen=True)
class OpSpec:
    """The properties of a type of operation.

    Attributes:
        factors: returns the labels of one operation of the type; raises Uncertain if they are not certain.
        combine: how parts of reduced factors are combined, an `op` of ops.all_reduce; None: no factor may be reduced.
        linear, kind: see `Linear`, `Kind`.
        never_empty: whether the kernel fails on an empty tensor, so that a rank without rows passes one row of zeros.
        make: builds the operation on shards, if this takes another operation.
    """

    factors: FactorsOf
    combine: str | None = None
    linear: Linear = Linear()
    kind: Kind = Kind.OTHER
    never_empty: bool = False
    make: Make | None = None


_specs: dict[str, OpSpec] = {}


def _no_factors(known: Extents, node: Node) -> Factors:
    raise Uncertain


_NO_SPEC = OpSpec(_no_factors)


def spec(
    *types: str,
    combine: str | None = None,
    linear: Linear = Linear(),
    kind: Kind = Kind.OTHER,
    never_empty: bool = False,
    make: Make | None = None,
) -> Callable[[FactorsOf], FactorsOf]:
    """Registers the spec of types of operations; decorates the function that returns their factors."""

    def register(factors: FactorsOf) -> FactorsOf:
        for each in types:
            assert each not in _specs, f"two specs for {each}"
            _specs[each] = OpSpec(factors, combine, linear, kind, never_empty, make)
        extents(*types)(extents_of)
        return factors

    return register


def spec_of(node: Node) -> OpSpec:
    """Returns the spec of an operation's type, or an empty one."""
    return _specs.get(node.type, _NO_SPEC)


def specs() -> dict[str, OpSpec]:
    return _specs


def kind_of(node: Node) -> Kind:
    """Returns how an operation's results depend on its operands, according to its spec."""
    return spec_of(node).kind


def extents_of(known: Extents, node: Node) -> ResultExtents:
    """Returns the extents of an operation's results: each factor has one extent in all operands."""
    if kind_of(node) is Kind.FORWARD:
        return [if_certain(known.dims, each) for each in node.inputs]
    factors = _specs[node.type].factors(known, node)
    if factors.only_if_reshaped:
        raise Uncertain
    sizes: dict[str, set[Dim]] = {"1": {ONE}}
    for value, labels in zip(node.inputs, factors.operands):
        if isinstance(labels, str):
            for label, extent in zip(labels, if_certain(known.dims, value) or ()):
                sizes.setdefault(label, set()).add(extent)
    for value, labels in zip(node.inputs, factors.operands):
        if isinstance(labels, ShapeOf):
            sizes.update((label, {extent}) for label, extent in zip(labels.labels, known.numbers(value)))
    known_extents = {label: broadcast_extent(extents) for label, extents in sizes.items()} | {NEW: factors.new}
    return [[known_extents.get(label) for label in labels] for labels in factors.results]


def labels_of(dims: Dims, replicated: Sequence[int] = ()) -> str:
    """Returns a label for each axis; labels of axes that must be replicated are in upper case."""
    if len(dims) > len(LABELS):
        raise Uncertain
    taken = {axis % len(dims) for axis in replicated}
    return "".join(each.upper() if axis in taken else each for axis, each in enumerate(LABELS[: len(dims)]))


def without(labels: str, axes: Sequence[int]) -> str:
    """Returns the labels of other axes."""
    return "".join(each for axis, each in enumerate(labels) if axis not in axes)


def broadcast_labels(shapes: Sequence[Dims]) -> tuple[list[str], str]:
    """Returns the labels of operands that are broadcast against each other, and of the result.

    If it is unknown whether an extent is 1, the axis is replicated, because only the global tensors tell.
    """
    rank = max(map(len, shapes))
    if rank > len(LABELS):
        raise Uncertain
    aligned = [(ONE,) * (rank - len(dims)) + dims for dims in shapes]
    larger = [{dims[axis] for dims in aligned if dims[axis] != 1} for axis in range(rank)]
    result = "".join(label.upper() if len(each) > 1 else label for label, each in zip(LABELS, larger))
    operands = [
        "".join("1" if e == 1 and more else label for e, more, label in zip(dims, larger, result)) for dims in aligned
    ]
    return [labels[rank - len(dims) :] for labels, dims in zip(operands, shapes)], result
