"""Extents of what is computed from ragged and sparse tensors: how many rows it has. These operations have no spec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keras_ddl.cut.dims import Dim
from keras_ddl.cut.extents import Extents, Numbers, ResultExtents, extents, numbers
from keras_ddl.cut.program import Node, Value


@extents("RaggedTensorToTensor")
def _padded(known: Extents, node: Node) -> ResultExtents:
    shape, values, _, *partitions = node.inputs
    dims, kinds, rank = known.dims(values), node.attr("row_partition_types", list), node.outputs[0].rank
    if dims is None or rank is None or rank != len(dims) + _ragged_rank(kinds):
        return [None]
    wanted = known.numbers(shape)
    if wanted is None or len(wanted.entries) != (1 if wanted.is_scalar else rank):
        return [None]
    asked = wanted.entries * rank if wanted.is_scalar else wanted.entries  # a scalar is -1: nothing is asked for
    rows = _nrows(known, kinds[0], partitions[0]) if asked[0] == -1 else asked[0]
    return [[*_if_extents([rows]), *_if_extents(asked[1:])]]


def _ragged_rank(kinds: Sequence[bytes]) -> int:
    return sum(kind != b"FIRST_DIM_SIZE" for kind in kinds)


def _nrows(known: Extents, kind: bytes, partition: Value) -> Dim | None:
    if kind == b"FIRST_DIM_SIZE":
        return known.number(partition)
    dims = known.dims(partition) if kind == b"ROW_SPLITS" else None
    return None if dims is None else dims[0] - 1


@extents("SparseToDense", "ScatterNd")
def _scattered(known: Extents, node: Node) -> ResultExtents:
    shape = known.numbers(node.inputs[1 if node.type == "SparseToDense" else 2])
    return [None if shape is None or shape.is_scalar else _if_extents(shape.entries)]


@extents("SparseTensorDenseMatMul")
def _matmul(known: Extents, node: Node) -> ResultExtents:
    shape, dims = known.numbers(node.inputs[2]), known.dims(node.inputs[3])
    if shape is None or dims is None or len(shape.entries) != 2:
        return [None]
    rows = shape.entries[1 if node.attr("adjoint_a", bool) else 0]
    return [[*_if_extents([rows]), dims[0 if node.attr("adjoint_b", bool) else 1]]]


@extents("SparseSegmentSumWithNumSegments", "SparseSegmentMeanWithNumSegments", "SparseSegmentSqrtNWithNumSegments")
def _segments(known: Extents, node: Node) -> ResultExtents:
    dims, count = known.dims(node.inputs[0]), known.number(node.inputs[3])
    return [None if dims is None or count is None else [*_if_extents([count]), *dims[1:]]]


@extents("SparseFillEmptyRows")
def _filled(known: Extents, node: Node) -> ResultExtents:
    shape = known.numbers(node.inputs[2])
    return [None, None, None if shape is None else _if_extents(shape.entries[:1]), None]


@numbers("StringSplitV2")
def _split(known: Extents, node: Node) -> list[Numbers | None]:
    """Strings [n] are split into a sparse tensor of n rows."""
    dims, shape = known.dims(node.inputs[0]), node.outputs[2]
    return [None, None, None if dims is None else Numbers([dims[0], Dim.unknown("entry", shape.key, 1)])]


@numbers("RaggedTensorToSparse")
def _as_sparse(known: Extents, node: Node) -> list[Numbers | None]:
    dims, shape = known.dims(node.inputs[0]), node.outputs[2]
    if dims is None or shape.shape[0] is None:
        return [None, None, None]
    others = [Dim.unknown("entry", shape.key, axis) for axis in range(1, shape.shape[0])]
    return [None, None, Numbers([dims[0] - 1, *others])]


def _if_extents(entries: Iterable[Dim | None]) -> list[Dim | None]:
    return [each if each is not None and each.is_extent else None for each in entries]
