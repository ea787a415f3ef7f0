"""Every spec of the cut (keras_ddl/cut/specs) equals one process in every placement of its operands."""

from __future__ import annotations

import numpy as np
import pytest
from cut import rule_cases
from cut.operations import operands
from cut.placements import SETTINGS, Case, Ranks, differences

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.operations import factors
from keras_ddl.cut.specs.entrywise import BINARY, UNARY

INF, NAN = np.inf, np.nan
# A rank without rows, and an unknown number of rows; with one in `step` cases for each type of operation.
QUICK = ((Ranks(3, 2), 8), (Ranks(3, 4, static=False), 24))


def _kind(kind: str) -> str:
    if kind in operands.DIVISIONS:
        return "d"
    if kind in operands.INTEGERS:
        return "i"
    if kind in operands.BOOLS:
        return "b"
    return "p" if kind in operands.POSITIVE | {"Polygamma"} else "s" if kind in operands.SMALL else "f"


def _unary() -> list[Case]:
    found = []
    for number, kind in enumerate(UNARY):
        if kind != "Cast" and kind not in operands.COMPLEX:
            found.append(Case(kind, [f"{('n2', '2n', 'm')[number % 3]} {_kind(kind)}"]))
    casts = [("f", tf.float32), ("h", tf.float64), ("f", tf.int32), ("i", tf.float64), ("i", tf.int64), ("b", tf.int32)]
    found += [Case("Cast", [f"2n {kind}"], {"DstT": to}) for kind, to in casts]
    return found


_ALL_SHAPES = ("AddV2", "Mul", "RealDiv", "Less")  # one pair of shapes for the others, whose factors are the same
_SHAPES = [("n2", "n2"), ("n2", "2"), ("nn", "n"), ("n1", "1n"), ("2n", "n"), ("m2", "m1"), ("", "n2"), ("12", "n2")]


def _binary() -> list[Case]:
    found = []
    for number, kind in enumerate(BINARY):
        if kind == "SelectV2":
            found += [Case(kind, ["n1 b", "n2 f", "2 f"]), Case(kind, [" b", "2n f", "2n f"])]
            found += [Case(kind, ["n b", "nn f", "nn f"])]
            continue
        letter = _kind(kind)
        if kind == "Complex":
            found += [Case(kind, ["n2 f", "2 f"], {"Tout": tf.complex128})]
            continue
        if kind == "Polygamma":
            found += [Case(kind, [np.ones((2,)), "n2 p"]), Case(kind, [np.ones((1, 1)), "nn p"])]
            continue
        shapes = _SHAPES if kind in _ALL_SHAPES else [_SHAPES[number % len(_SHAPES)]]
        if kind.endswith("Grad"):
            shapes = [("n2", "n2")]
        found += [Case(kind, [f"{a} {letter}", f"{b} {letter}"]) for a, b in shapes]
    for factor in (2.0, 0.0, INF, NAN, [2.0, 0.0], [3.0, INF], [-1.0, 4.0]):
        constant = np.array(factor)
        found += [Case("Mul", ["n2 f", constant]), Case("Mul", [constant, "n2 f"])]
        found += [Case(kind, ["n2 f", constant]) for kind in ("RealDiv", "Div", "DivNoNan", "Sub", "AddV2")]
        found += [Case("RealDiv", [constant, "n2 p"])]
    found += [Case("Mul", ["n2 i", "2 i"]), Case("Mul", ["2 i", np.int32([0, 3])]), Case("FloorDiv", ["n2 i", "2 d"])]
    found += [Case("Div", ["n2 i", np.int32([2, 3])]), Case("Mul", ["n2 h", np.float32([2, 3])])]
    found += [Case("AddN", ["n2 f"] * 3), Case("AddN", ["2 f"] * 2)]
    return found


def _contractions() -> list[Case]:
    found = []
    for a in (False, True):
        for b in (False, True):
            found.append(Case("MatMul", ["nn f", "nn f"], {"transpose_a": a, "transpose_b": b}))
            found.append(Case("BatchMatMulV2", ["nnn f", "nnn f"], {"adj_x": a, "adj_y": b}))
            shapes = ("1n2" if a else "12n", "n1n" if b else "nn1")
            found.append(Case("BatchMatMulV2", [f"{each} f" for each in shapes], {"adj_x": a, "adj_y": b}))
    found += [Case("MatMul", ["2n f", "n3 f"]), Case("MatMul", ["m2 f", "2m f"]), Case("MatMul", ["2m f", "m2 f"])]
    found += [Case("MatMul", ["2n f", np.full((1, 2), INF)[:, :1] * np.ones((2, 1))], {"transpose_a": True})]
    found += [
        Case("BatchMatMulV2", ["n2n f", "n2 f"]),
        Case("BatchMatMul", ["n2n f", "nn2 f"]),
        Case("BatchMatMulV3", ["n2n f", "1n2 f"], {"Tout": tf.float64}),
    ]
    for equation, *shapes in (
        ("ij,jk->ik", "nn", "nn"),
        ("ij,jk->ki", "n2", "2n"),
        ("ij,ij->", "nn", "nn"),
        ("ij,ij->j", "nn", "nn"),
        ("ij,k->ik", "nn", "n"),
        ("i,j->ij", "n", "n"),
        ("...a,ab->...b", "2n2", "2n"),
        ("ij->ji", "nn"),
        ("ij->i", "nn"),
        ("aB,Bc->ac", "nn", "nn"),
        ("ij->", "m2"),
        ("bij,bjk->bik", "nn2", "n2n"),
        ("b...i,ij->b...j", "n2n", "nn"),
    ):
        found.append(Case("Einsum", [f"{each} f" for each in shapes], {"equation": equation}))
    found += [Case("BiasAdd", ["n2n f", "n f"]), Case("BiasAdd", ["nn f", "n f"])]
    found += [Case("BiasAdd", ["2n2n f", "n f"], {"data_format": "NCHW"}), Case("BiasAddGrad", ["n2n f"])]
    found += [Case("BiasAddGrad", ["2nnn f"], {"data_format": "NCHW"}), Case("BiasAddGrad", ["nn f"])]
    return found


def _reductions() -> list[Case]:
    found = []
    for kind in ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"):
        letter = "b" if kind in ("All", "Any") else "f"
        for axes in ([0], [1], [0, 1], [-1], [], [0, 2]):
            for keep in (False, True):
                found.append(Case(kind, [f"nn2 {letter}", np.int32(axes)], {"keep_dims": keep}))
        if letter == "f":
            found += [Case(kind, ["2n i", np.int32([1])]), Case(kind, ["mn f", np.int32([0])])]
            found += [Case(kind, ["n2 h", np.int32([0])])]
    found += [Case("L2Loss", ["nn f"])]
    for kind in ("ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp"):
        found += [Case(kind, ["nn2 f", np.int32(axis)]) for axis in (0, 1, -1)]
    for kind in ("Cumsum", "Cumprod", "CumulativeLogsumexp"):
        found += [Case(kind, ["nn f", np.int32(0)], {"exclusive": True, "reverse": True})]
    found += [Case("ReverseV2", ["nn2 f", np.int32(axes)]) for axes in ([0], [1], [-1], [0, 1], [])]
    return found


def _last_axis() -> list[Case]:
    found = [Case(kind, [f"{shape} f"]) for kind in ("Softmax", "LogSoftmax") for shape in ("nn", "2nn", "m2")]
    found += [Case("SparseSoftmaxCrossEntropyWithLogits", [f"{a} f", f"{b} x"]) for a, b in (("nn", "n"), ("m9", "m"))]
    found += [
        Case("SoftmaxCrossEntropyWithLogits", [f"{a} f", f"{b} p"])
        for a, b in (("nn", "nn"), ("n2", "12"), ("1n", "nn"), ("n2", "n1"))
    ]
    found += [Case("InTopK", ["nn h", "n x"], {"k": 1}), Case("InTopKV2", ["n4 h", "n x", np.int32(2)])]
    found += [Case("TopKV2", [f"{shape} f", np.int32(1)]) for shape in ("nn", "2nn")]
    return found


def _moved_axes() -> list[Case]:
    found = [Case("Transpose", ["nn2 f", np.int32(order)]) for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1], [1, 2, 0])]
    found += [Case("Roll", ["nn2 f", np.int32([1, -2]), np.int32(axes)]) for axes in ([0, 0], [1, 2], [-1, -1])]
    found += [Case("Roll", ["n4 f", np.int32(1), np.int32(1)])]
    for shape, along, of in (("n4", 1, 0), ("4nn", 0, 1), ("nn4", 2, 1)):
        found += [Case("ReverseSequence", [f"{shape} f", "n x"], {"seq_dim": along, "batch_dim": of})]
    found += [Case("ConjugateTranspose", ["n2 f", np.int32([1, 0])])]
    found += [Case("ExpandDims", ["nn f", np.int32(axis)]) for axis in (0, 1, 2, -1, -2)]
    found += [Case("Squeeze", ["1n1n f"], {"axis": axis}) for axis in ([], [0], [2], [-2], [0, 2])]
    found += [
        Case("BroadcastTo", [f"{own} f", lambda n, to=to: np.int32([n if e == "n" else int(e) for e in to])])
        for own, to in (("n", "2n"), ("1n", "nn"), ("n1", "nn"), ("nn", "nn"), ("n", "nn"), ("n1", "2n2"))
    ]
    found += [Case("Pack", ["nn f"] * 2, {"axis": axis}) for axis in (0, 1, 2, -1)]
    found += [Case("Unpack", [f"{shape} f"], {"num": 2, "axis": axis}) for shape, axis in (("n2n", 1), ("2nn", 0))]
    found += [Case("Unpack", ["nn2 f"], {"num": 2, "axis": axis}) for axis in (2, -1)]
    found += [Case("EnsureShape", ["n2 f"], {"shape": [None, 2]})]
    for paddings in ([[0, 0], [1, 0]], [[0, 1], [0, 0]], [[1, 1], [0, 1]], [[0, 0], [0, 0]]):
        found += [Case("Pad", ["nn f", np.int32(paddings)]), Case("PadV2", ["nn f", np.int32(paddings), np.array(7.0)])]
    found += [Case("MirrorPad", [shape, np.int32([[0, 0], [1, 1]])], {"mode": "REFLECT"}) for shape in ("n4 f", "n3 f")]
    found += [Case("MirrorPad", ["4n f", np.int32([[2, 1], [0, 0]])], {"mode": "SYMMETRIC"})]
    found += [Case("MirrorPadGrad", ["n6 f", np.int32([[0, 0], [1, 1]])], {"mode": "REFLECT"})]
    return found


def _indexing() -> list[Case]:
    found = []
    for axis in (0, 1, 2, -1):
        found += [Case("GatherV2", ["nnn f", f"{at} x", np.int32(axis)]) for at in ("", "n", "2n")]
    for batch, axis, table, at in ((1, 1, "nnn", "nn"), (1, 2, "nnn", "n2"), (1, 1, "nn", "n"), (-1, 1, "nn2", "n2")):
        found += [Case("GatherV2", [f"{table} f", f"{at} x", np.int32(axis)], {"batch_dims": batch})]
    found += [Case("GatherV2", ["2nn f", "2n x", np.int32(2)], {"batch_dims": 2})]
    for axis in (-1, 0, 1):
        found += [Case("OneHot", ["nn x", np.int32(4), np.array(2.0), np.array(-1.0)], {"axis": axis})]
    found += [
        Case("GatherNd", [f"{table} f", f"{at} x"]) for table, at in (("nn2", "n2"), ("nnn", "nn1"), ("n2", "m1"))
    ]
    for kind in ("LowerBound", "UpperBound"):
        found += [Case(kind, ["n4 f", "n3 f"]), Case(kind, [np.arange(-8.0, 8.0)[None], "1n f"])]
    for binary in (False, True):
        for shape in ("n", "nn", "m"):
            found += [Case("DenseBincount", [f"{shape} x", np.int32(4), np.zeros([0])], {"binary_output": binary})]
            found += [Case("DenseBincount", [f"{shape} x", np.int32(4), f"{shape} f"], {"binary_output": binary})]
    return found


def _images() -> list[Case]:
    image, kernel = "n333 f", np.sin(np.arange(24.0)).reshape(2, 2, 3, 2)
    by = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    shape = lambda n: np.int32([n, 3, 3, 3])  # noqa: E731
    found = [Case("Conv2D", [image, kernel], by), Case("DepthwiseConv2dNative", [image, kernel], by)]
    found += [Case("Conv2DBackpropInput", [shape, kernel, "n332 f"], by)]
    found += [Case("DepthwiseConv2dNativeBackpropInput", [shape, kernel, "n336 f"], by)]
    found += [Case("Conv2DBackpropFilter", [image, np.int32([2, 2, 3, 2]), "n332 f"], by)]
    found += [Case("DepthwiseConv2dNativeBackpropFilter", [image, np.int32([2, 2, 3, 2]), "n336 f"], by)]
    found += [Case("Dilation2D", [image, kernel[..., 0]], {**by, "rates": [1, 1, 1, 1]})]
    pool = {"ksize": [1, 2, 2, 1], **by}
    found += [Case("MaxPool", [image], pool), Case("AvgPool", [image], pool)]
    found += [Case("MaxPoolGrad", [image] * 3, pool)]
    found += [Case("AvgPoolGrad", [shape, image], pool)]
    solid, five = "n2222 f", {"strides": [1] * 5, "padding": "SAME"}
    pool3 = {"ksize": [1, 2, 2, 2, 1], **five}
    filters = np.sin(np.arange(16.0)).reshape(2, 2, 1, 2, 2)
    shape3 = lambda n: np.int32([n, 2, 2, 2, 2])  # noqa: E731
    found += [Case("Conv3D", [solid, filters], five)]
    found += [Case("Conv3DBackpropInputV2", [shape3, filters, solid], five)]
    found += [Case("Conv3DBackpropFilterV2", [solid, np.int32([2, 2, 1, 2, 2]), solid], five)]
    found += [Case("MaxPool3D", ["n2222 h"], pool3), Case("MaxPool3DGrad", ["n2222 h"] * 3, pool3)]
    found += [Case("AvgPool3D", ["n2222 h"], pool3), Case("AvgPool3DGrad", [shape3, "n2222 h"], pool3)]
    found += [Case("LRN", ["n333 h"]), Case("LRNGrad", ["n333 h"] * 3)]
    found += [Case("SpaceToDepth", ["n223 f"], {"block_size": 2}), Case("DepthToSpace", ["n114 f"], {"block_size": 2})]
    block, none = np.int32([2, 1]), np.int32([[0, 0], [0, 0]])
    for shape, paddings in (("n42 f", none), ("m33 f", np.int32([[0, 1], [1, 0]])), ("2m2 f", none)):
        found += [Case("SpaceToBatchND", [shape, block, paddings])]
    found += [Case("BatchToSpaceND", ["m42 f", block, np.int32([[1, 0], [0, 0]])])]
    found += [Case("AdjustContrastv2", [shape, np.float32(2)]) for shape in ("nn23 h", "n23 h")]
    found += [Case(kind, ["n223 h", np.float32(0.5)]) for kind in ("AdjustHue", "AdjustSaturation")]
    window = {"ksizes": [1, 2, 2, 1], "strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "SAME"}
    found += [Case("ExtractImagePatches", [image], window)]
    size = np.int32([2, 4])
    for kind in ("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"):
        found += [Case(kind, [image, size])]
    found += [Case(kind, ["n333 h", "n243 f"]) for kind in ("ResizeBilinearGrad", "ResizeBicubicGrad")]
    found += [Case("ResizeNearestNeighborGrad", [image, size])]
    found += [Case("ScaleAndTranslate", ["n333 h", size, np.float32([1, 1.5]), np.float32([0, 0.5])])]
    for transforms in ("n8 h", np.float32([[1, 0.5, 0, 0, 1, 0, 0, 0]])):
        found += [Case("ImageProjectiveTransformV2", ["n333 h", transforms, size], {"interpolation": "BILINEAR"})]
        fill = {"interpolation": "NEAREST"}
        found += [Case("ImageProjectiveTransformV3", ["n333 h", transforms, size, np.float32(3)], fill)]
    return found


def _matrices() -> list[Case]:
    found = [Case(kind, ["nn44 f"]) for kind in ("MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant", "Qr")]
    found += [Case("Svd", ["nn42 f"]), Case("SelfAdjointEigV2", ["n33 f"])]
    found += [Case(kind, ["nn33 f", "nn32 f"]) for kind in ("MatrixSolve", "MatrixTriangularSolve")]
    found += [Case("MatrixTriangularSolve", ["133 f", "n32 f"]), Case("Cross", ["nn3 f", "nn3 f"])]
    below, above = np.int32(1), np.int32(0)
    found += [Case("MatrixBandPart", [shape, below, above]) for shape in ("nnn f", "2n3n f", "nn f")]
    found += [Case("MatrixDiagPartV3", ["nn34 f", np.int32(k), np.array(7.0)]) for k in (0, [0, 1])]
    size = np.int32(-1)
    found += [
        Case("MatrixDiagV3", [shape, np.int32(0), size, size, np.array(7.0)]) for shape in ("nn f", "n3 f", "n f")
    ]
    found += [Case("MatrixDiagV3", ["n23 f", np.int32([0, 1]), size, size, np.array(7.0)])]
    found += [Case("RFFT", ["nn8 h", np.int32([6])]), Case("RFFT2D", ["nn44 h", np.int32([4, 4])])]
    return [*found, Case("RGBToHSV", ["nn23 s"]), Case("HSVToRGB", ["nn23 s"])]


def _others() -> list[Case]:
    found = [Case("Select", [f"{c} b", f"{x} f", f"{x} f"]) for c, x in (("nn", "nn"), ("n", "nn"), ("", "2n"))]
    found += [Case("Bitcast", ["2n f"], {"type": tf.int64}), Case("Bitcast", ["nn i"], {"type": tf.int16})]
    found += [Case("Bitcast", ["nn2 i"], {"type": tf.int64}), Case("Bitcast", [" i"], {"type": tf.float32})]
    found += [Case(kind, [shape]) for kind in ("StringLower", "StringLength") for shape in ("n2 t", "2n t")]
    found += [Case("StringJoin", ["n2 t", " t"]), Case("StringJoin", ["nn t", "nn t"])]
    found += [Case("Substr", ["n2 t", np.int32([1, 2]), np.int32([2, 1])])]
    found += [Case(kind, ["n2 f"]) for kind in ("Identity", "StopGradient", "PreventGradient", "Snapshot")]
    found += [Case("IdentityN", ["n2 f", "2n i"])]
    found += [Case("ClipByValue", ["n2 f", np.array(-1.0), np.array(1.0)]), Case("Betainc", ["n2 s"] * 3)]
    found += [Case("ApproximateEqual", ["2n f", "2n f"], {"tolerance": 1.0})]
    found += [Case("Bucketize", ["2n f"], {"boundaries": [-1.0, 0.5]})]
    return found


TOPICS = {
    "unary": _unary(),
    "binary": _binary(),
    "contractions": _contractions(),
    "reductions": _reductions(),
    "last_axis": _last_axis(),
    "moved_axes": _moved_axes(),
    "indexing": _indexing(),
    "images": _images(),
    "matrices": _matrices(),
    "others": _others(),
}
# Tested elsewhere: other attributes of strings, complex numbers, positive matrices (test_operations.py), and resources
# (test_programs.py).
_ELSEWHERE = {
    *operands.COMPLEX,
    *("FFT", "IFFT", "FFT2D", "IFFT2D", "IRFFT", "IRFFT2D"),
    "Cholesky",
    "ResourceGather",
    "LookupTableFindV2",
    "StringUpper",
    "StringStrip",
    "AsString",
}
_ELSEWHERE |= {each for each in factors.specs() if each.startswith(("Regex", "Static", "Unicode", "StringTo"))}
_ELSEWHERE |= {"DecodeBase64", "EncodeBase64", "MaxPoolGradGrad"}  # the last needs a pool and its own result


@pytest.mark.parametrize(("ranks", "step"), QUICK, ids=str)
@pytest.mark.parametrize("topic", [*TOPICS, *rule_cases.TOPICS])
def test_some_placements_equal_one_process(topic: str, ranks: Ranks, step: int) -> None:
    cases = {**TOPICS, **rule_cases.TOPICS}[topic]
    limit = 1
    if topic == "contractions" and ranks.static:  # all its cases differ and have more placements
        step, limit = 1, 4
    seen: dict[str, int] = {}
    chosen = []
    for case in cases:  # the first of each type, then one in `step`
        seen[case.type] = seen.get(case.type, -1) + 1
        chosen += [case] if seen[case.type] % step == 0 else []
    wrong, tried = differences(chosen, ranks, limit)
    assert tried >= len(seen) // 2
    assert not wrong, "\n".join([f"{len(wrong)} of {tried}", *wrong[:20]])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [*SETTINGS, Ranks(2, 3, static=False), Ranks(4, 6)], ids=str)
@pytest.mark.parametrize("topic", [*TOPICS, *rule_cases.TOPICS])
def test_all_placements_equal_one_process(topic: str, ranks: Ranks) -> None:
    for case in {**TOPICS, **rule_cases.TOPICS}[topic]:
        wrong, tried = differences([case], ranks)
        assert not wrong, "\n".join([f"{len(wrong)} of {tried}", *wrong[:20]])


def test_every_spec_is_tried() -> None:
    tried = {case.type for cases in TOPICS.values() for case in cases}
    assert sorted(set(factors.specs()) - tried - _ELSEWHERE) == []
