"""Extents (row counts) of ragged and sparse results. These operations have no spec."""

from __future__ import annotations

from collections.abc import Iterable

from keras_ddl.cut.analysis.dims import Dim, Uncertain, if_certain
from keras_ddl.cut.analysis.extents import Extents, ResultExtents, ResultNumbers, extents, numbers
from keras_ddl.cut.analysis.program import Node, Value


@extents("RaggedTensorToTensor")
def _padded(known: Extents, node: Node) -> ResultExtents:
    _, values, _, *partitions = node.inputs
    dims, kinds, rank = known.dims(values), node.attr("row_partition_types", list), node.outputs[0].rank
    shape = known.numbers(node.inputs[0])
    if rank is None or rank != len(dims) + sum(kind != b"FIRST_DIM_SIZE" for kind in kinds):
        raise Uncertain
    if len(shape) != (rank if node.inputs[0].rank == 1 else 1):
        raise Uncertain
    entries = shape if node.inputs[0].rank == 1 else shape * rank  # a scalar is -1: no particular shape is requested
    rows = if_certain(_nrows, known, kinds[0], partitions[0]) if entries[0] == -1 else entries[0]
    return [[*_if_extents([rows]), *_if_extents(entries[1:])]]


def _nrows(known: Extents, kind: bytes, partition: Value) -> Dim:
    if kind == b"FIRST_DIM_SIZE":
        return known.number(partition)
    if kind != b"ROW_SPLITS":
        raise Uncertain
    return known.dims(partition)[0] - 1


@extents("SparseToDense", "ScatterNd")
def _scattered(known: Extents, node: Node) -> ResultExtents:
    return [_if_extents(known.vector(node.inputs[1 if node.type == "SparseToDense" else 2]))]


@extents("SparseTensorDenseMatMul")
def _matmul(known: Extents, node: Node) -> ResultExtents:
    shape, dims = known.numbers(node.inputs[2]), known.dims(node.inputs[3])
    if len(shape) != 2:
        raise Uncertain
    rows = shape[1 if node.attr("adjoint_a", bool) else 0]
    return [[*_if_extents([rows]), dims[0 if node.attr("adjoint_b", bool) else 1]]]


@extents("SparseSegmentSumWithNumSegments", "SparseSegmentMeanWithNumSegments", "SparseSegmentSqrtNWithNumSegments")
def _segments(known: Extents, node: Node) -> ResultExtents:
    dims, count = known.dims(node.inputs[0]), known.number(node.inputs[3])
    return [[*_if_extents([count]), *dims[1:]]]


@extents("SparseFillEmptyRows")
def _filled(known: Extents, node: Node) -> ResultExtents:
    indices, _, shape, _ = node.inputs
    count = known.extent_by(node.outputs[0], 0, [indices, shape])
    return [[count, None], [count], _if_extents(known.numbers(shape)[:1]), None]


@numbers("StringSplitV2")
def _split(known: Extents, node: Node) -> ResultNumbers:
    """Returns the extents: n strings give a sparse tensor of n rows."""
    dims, shape = known.dims(node.inputs[0]), node.outputs[2]
    return [None, None, [dims[0], Dim.unknown("size", shape.key, 1)]]


@extents("RaggedTensorToSparse")
def _as_sparse_extents(known: Extents, node: Node) -> ResultExtents:
    count = known.extent_by(node.outputs[1], 0, node.inputs)
    return [[count, None], [count], None]


@numbers("RaggedTensorToSparse")
def _as_sparse(known: Extents, node: Node) -> ResultNumbers:
    dims, shape = known.dims(node.inputs[0]), node.outputs[2]
    if shape.shape[0] is None:
        raise Uncertain
    others = [Dim.unknown("size", shape.key, axis) for axis in range(1, shape.shape[0])]
    return [None, None, [dims[0] - 1, *others]]


@numbers("SparseReshape")
def _reshaped_sparse(known: Extents, node: Node) -> ResultNumbers:
    shape, key = known.vector(node.inputs[2]), node.outputs[1].key  # an unknown entry may be -1
    return [None, [each if each.is_extent else Dim.unknown("size", key, i) for i, each in enumerate(shape)]]


def _if_extents(entries: Iterable[Dim | None]) -> list[Dim | None]:
    return [each if each is not None and each.is_extent else None for each in entries]
