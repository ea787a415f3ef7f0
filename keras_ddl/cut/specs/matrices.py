"""Operations on single vectors, matrices and pictures: the axes before them are passed through."""

from __future__ import annotations

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


@spec("RGBToHSV", "HSVToRGB", "FFT", "IFFT")
def _vectors(known: Extents, node: Node) -> Factors:
    return _each(known, node, [1], keeps_shape=True)


@spec("AdjustContrastv2", "AdjustHue", "AdjustSaturation")
def _pictures(known: Extents, node: Node) -> Factors:
    """Height, width and colors; a contrast is relative to the mean of a picture."""
    return _each(known, node, [3], keeps_shape=True)


@spec("RFFT", "IRFFT")
def _real_vectors(known: Extents, node: Node) -> Factors:
    return _each(known, node, [1])


@spec("MatrixInverse", "Cholesky", "FFT2D", "IFFT2D")
def _matrices(known: Extents, node: Node) -> Factors:
    return _each(known, node, [2], keeps_shape=True)


@spec("MatrixBandPart", linear=Linear(at=(0,), moves=True))
def _bands(known: Extents, node: Node) -> Factors:
    return _each(known, node, [2], keeps_shape=True)


@spec("MatrixDeterminant", "LogMatrixDeterminant", "Qr", "MatrixDiagPartV3", "RFFT2D", "IRFFT2D")
def _of_matrices(known: Extents, node: Node) -> Factors:
    return _each(known, node, [2])


@spec("Svd", "SelfAdjointEigV2")
def _spectra(known: Extents, node: Node) -> Factors:
    """Without vectors the other results are empty, and have none of the axes."""
    if not node.attr("compute_uv" if node.type == "Svd" else "compute_v", bool):
        raise Uncertain
    return _each(known, node, [2])


@spec("MatrixSolve", "MatrixTriangularSolve")
def _solutions(known: Extents, node: Node) -> Factors:
    return _each(known, node, [2, 2])


@spec("MatrixDiagV3")
def _of_diagonals(known: Extents, node: Node) -> Factors:
    """Only for one diagonal per matrix; several diagonals would be a matrix themselves."""
    if node.inputs[1].rank != 0:
        raise Uncertain
    return _each(known, node, [1])


@spec("Cross")
def _cross(known: Extents, node: Node) -> Factors:
    return _each(known, node, [1, 1], keeps_shape=True)
