"""Specs of look-ups by index and counts, and the extents of sums by index."""

from __future__ import annotations

from keras_ddl.cut.analysis.dims import Uncertain, certain, if_certain
from keras_ddl.cut.analysis.extents import Extents, ResultExtents, ResultNumbers, extents, numbers
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations.factors import LABELS, NEW, Factors, Linear, labels_of, spec


@spec("GatherV2", linear=Linear(at=(0,), moves=True))
def _gather(known: Extents, node: Node) -> Factors:
    """`batch...before K after..., batch...at -> batch...before at after...`: `at` are indices into axis K."""
    table, at, axis = known.dims(node.inputs[0]), known.dims(node.inputs[1]), known.constants(node.inputs[2])
    if len(table) + len(at) > len(LABELS):
        raise Uncertain
    position, batch = axis[0] % len(table), node.attr("batch_dims", int)
    batch += len(at) if batch < 0 else 0
    labels = labels_of(table, [position])
    own = LABELS[len(table) :][: len(at) - batch]
    result = labels[:position] + own + labels[position + 1 :]
    return Factors([labels, labels[:batch] + own, None], [result])


@spec("GatherNd", linear=Linear(at=(0,), moves=True))
def _gather_nd(known: Extents, node: Node) -> Factors:
    """`K... A..., at... C -> at... A...`: C indices per entry, into the first C axes of a table that is not empty."""
    table, at = known.dims(node.inputs[0]), known.dims(node.inputs[1])
    width = certain(at[-1].number if at else None)
    if len(table) + len(at) > len(LABELS):
        raise Uncertain
    labels, own = labels_of(table, range(len(table))), LABELS[len(table) :][: len(at)]
    return Factors([labels, own[:-1] + own[-1].upper()], [own[:-1] + labels[width:]])


@spec("LowerBound", "UpperBound")
def _bounds(known: Extents, node: Node) -> Factors:
    """Finds positions in sorted rows; there is one row of values for each sorted row."""
    return Factors(["rA", "rb"], ["rb"])


@spec("ResourceGather")
def _gather_of_variable(known: Extents, node: Node) -> Factors:
    labels, rank = labels_of(known.dims(node.inputs[1])), certain(node.outputs[0].rank)
    if node.attr("batch_dims", int):
        raise Uncertain
    return Factors([None, labels], [labels + NEW * (rank - len(labels))])


@spec("OneHot")
def _one_hot(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]))
    axis = node.attr("axis", int) % (len(labels) + 1)
    result = labels[:axis] + NEW + labels[axis:]
    return Factors([labels, None, None, None], [result], new=if_certain(known.number, node.inputs[1]))


@spec("DenseBincount", combine="sum")
def _bincount(known: Extents, node: Node) -> Factors:
    """Counts the values of each row [rows, n] or of all entries [n], or finds only whether a value occurs."""
    value, size, weights = node.inputs
    labels, weight_dims = labels_of(known.dims(value)), known.dims(weights)
    unweighted = any(each == 0 for each in weight_dims)
    combine = "max" if node.attr("binary_output", bool) else None
    if not labels or not unweighted and len(weight_dims) != len(labels):
        raise Uncertain
    operands = [labels, None, None if unweighted else labels]
    return Factors(operands, [labels[:-1] + NEW], if_certain(known.number, size), combine=combine)


def finds_for_each_key(node: Node) -> bool:
    """Whether a look-up certainly gives an entry for each entry of the keys.

    Tables may have vectors as keys or values. Only dense tables have such keys, and a look-up in one has no static
    shape unless the table is made inside the step.
    """
    table, keys = node.inputs[0].source().node, node.inputs[1]
    is_dense = table.type.startswith("MutableDenseHashTable")
    return keys.rank is not None and node.outputs[0].rank == keys.rank and not is_dense


@spec("LookupTableFindV2")
def _look_up(known: Extents, node: Node) -> Factors:
    """Looks up keys in a replicated table. Writes to tables have no rule, so all ranks write the same."""
    labels = labels_of(known.dims(node.inputs[1]))
    if not finds_for_each_key(node) or node.inputs[2].rank != 0:
        raise Uncertain
    return Factors([None, labels, None], [labels])


@extents("Unique", "UniqueV2")
def _unique(known: Extents, node: Node) -> ResultExtents:
    return [None, known.dims(node.inputs[0]) if node.inputs[0].rank == 1 else None]


@numbers("GatherV2")
def _gathered_numbers(known: Extents, node: Node) -> ResultNumbers:
    table, at = known.vector(node.inputs[0]), known.constants(node.inputs[1])
    if any(not 0 <= i < len(table) for i in at):
        raise Uncertain
    return [[table[i] for i in at]]


@extents("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def _segments(known: Extents, node: Node) -> ResultExtents:
    data, ids = known.dims(node.inputs[0]), known.dims(node.inputs[1])
    return [(if_certain(known.number, node.inputs[2]), *data[len(ids) :])]
