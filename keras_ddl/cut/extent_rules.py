"""Extents of what operations give; imported for what it registers in extents.py."""

from __future__ import annotations

from collections.abc import Sequence

from keras_ddl.cut.dims import Dim, product, total
from keras_ddl.cut.extents import Extents, broadcast, extents
from keras_ddl.cut.program import Node

# Of each output an extent per axis, None where it cannot be told; None for all of an output.
Told = list[Sequence[Dim | None] | None]


@extents("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics")
@extents("RandomShuffle", "ReverseSequence", "MatrixBandPart")
def _first_input(known: Extents, node: Node) -> Told:
    return [known.dims(each) for _, each in zip(node.outputs, node.inputs)]


@extents("ApproximateEqual", "Betainc", "ClipByValue")
def _broadcast(known: Extents, node: Node) -> Told:
    return [broadcast([known.dims(each) for each in node.inputs])]


@extents("Reshape")
def _reshape(known: Extents, node: Node) -> Told:
    wanted = known.numbers(node.inputs[1])
    if wanted is None:
        return [None]
    if all(each.is_extent for each in wanted.entries):
        return [wanted.entries]
    # An entry of which nothing is known may be -1, too: then nothing else may be told by it.
    total = known.size(node.inputs[0])
    open_axes = [each for each in wanted.entries if not each.is_extent]
    if open_axes != [Dim(-1)] or total is None:
        return [[each if each.is_extent else None for each in wanted.entries]]
    rest = total.divided_by(product(each for each in wanted.entries if each.is_extent))
    return [[each if each.is_extent else rest for each in wanted.entries]]


@extents("Fill")
def _filled(known: Extents, node: Node) -> Told:
    shape = known.numbers(node.inputs[0])
    return [None if shape is None or any(each == -1 for each in shape.entries) else shape.entries]


@extents("ConcatV2")
def _concatenated(known: Extents, node: Node) -> Told:
    parts, axis = [known.dims(each) for each in node.inputs[:-1]], known.number(node.inputs[-1])
    if any(each is None for each in parts) or axis is None or axis.number is None or not parts[0]:
        return [None]
    at = axis.number % len(parts[0])
    extent = total([each[at] for each in parts])
    return [[extent if a == at else each for a, each in enumerate(parts[0])]]


@extents("Range")
def _range(known: Extents, node: Node) -> Told:
    start, limit, step = (known.number(each) if each.dtype.is_integer else None for each in node.inputs)
    if start != 0 or step != 1 or limit is None:
        return [None]
    return [[limit] if limit.is_extent else None]


@extents("Tile")
def _tiled(known: Extents, node: Node) -> Told:
    dims, times = known.dims(node.inputs[0]), known.numbers(node.inputs[1])
    return [None if dims is None or times is None else [a * b for a, b in zip(dims, times.entries)]]


_FROM_SHAPE = (
    "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal StatelessRandomUniformV2 "
    "StatelessRandomNormalV2 StatelessTruncatedNormalV2 StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2 "
    "StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformInt Empty"
)


@extents(*_FROM_SHAPE.split())
def _drawn(known: Extents, node: Node) -> Told:
    shape = known.numbers(node.inputs[0])
    return [None if shape is None else shape.entries]


@extents("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def _segments(known: Extents, node: Node) -> Told:
    data, ids, count = known.dims(node.inputs[0]), known.dims(node.inputs[1]), known.number(node.inputs[2])
    return [None if data is None or ids is None else (count, *data[len(ids) :])]
