"""Operations on single vectors, matrices and pictures: the axes before them are passed through."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from keras_ddl.cut.analysis.dims import Uncertain, certain
from keras_ddl.cut.analysis.extents import Extents
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations.factors import NEW, Factors, Linear, Operand, broadcast_labels, spec

_LAST = ("XYZ", "UVW")  # of the operands' vectors, matrices, pictures


def _each(known: Extents, node: Node, ranks: Sequence[int], keeps_shape: bool = False) -> Factors:
    """Returns the labels if the first operands consist of tensors of these ranks; other operands are replicated."""
    shapes = [known.dims(each) for each in node.inputs[: len(ranks)]]
    if any(len(dims) < rank for dims, rank in zip(shapes, ranks)):
        raise Uncertain
    fronts, out = broadcast_labels([dims[: len(dims) - rank] for dims, rank in zip(shapes, ranks)])
    operands: list[Operand] = [front + last[-rank:] for front, last, rank in zip(fronts, _LAST, ranks)]
    operands += [None] * (len(node.inputs) - len(ranks))
    if keeps_shape:
        return Factors(operands, [out + _LAST[0][-ranks[0] :]])
    return Factors(operands, [out + NEW * (certain(each.rank) - len(out)) for each in node.outputs])


# Types, the ranks of the tensors that their first operands consist of, and whether results have the first one's shape.
_TYPES: list[tuple[str, list[int], bool]] = [
    ("RGBToHSV HSVToRGB FFT IFFT", [1], True),
    ("AdjustContrastv2 AdjustHue AdjustSaturation", [3], True),  # [height, width, colors]; a contrast is of one picture
    ("RFFT IRFFT", [1], False),
    ("MatrixInverse Cholesky FFT2D IFFT2D MatrixBandPart", [2], True),
    ("MatrixDeterminant LogMatrixDeterminant Qr MatrixDiagPartV3 RFFT2D IRFFT2D", [2], False),
    ("MatrixSolve MatrixTriangularSolve", [2, 2], False),
    ("Cross", [1, 1], True),
]
_MOVES = {"MatrixBandPart": Linear(at=(0,), moves=True)}
for _types, _ranks, _keeps_shape in _TYPES:
    for _type in _types.split():
        _factors = functools.partial(_each, ranks=_ranks, keeps_shape=_keeps_shape)
        spec(_type, linear=_MOVES.get(_type, Linear()))(_factors)


@spec("Svd", "SelfAdjointEigV2")
def _spectra(known: Extents, node: Node) -> Factors:
    """Without vectors the other results are empty, and have none of the axes."""
    if not node.attr("compute_uv" if node.type == "Svd" else "compute_v", bool):
        raise Uncertain
    return _each(known, node, [2])


@spec("MatrixDiagV3")
def _matrix_diag(known: Extents, node: Node) -> Factors:
    """Only for one diagonal per matrix; several diagonals would be a matrix themselves."""
    if node.inputs[1].rank != 0:
        raise Uncertain
    return _each(known, node, [1])
