"""Operations with rules of their own instead of specs, in every placement of their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cut.placements import Case


def _strided(shape: str, begin: Any, end: Any, strides: Any = None, /, **masks: int) -> Case:
    """Makes x[begin:end:strides]; the entry "n" is the number of rows, "m" twice that."""
    steps = np.int32([1] * len(begin) if strides is None else strides)
    attrs = {f"{name}_mask": masks.get(name, 0) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    return Case("StridedSlice", [f"{shape} f", _vector(begin), _vector(end), steps], attrs)


def _strided_grad(like: Sequence[Any], shape: str, begin: Any, end: Any, strides: Any = None, /, **masks: int) -> Case:
    case = _strided(shape, begin, end, strides, **masks)
    gradient, *operands = case.operands
    return Case("StridedSliceGrad", [_vector(like), *operands, gradient], case.attrs)


def _vector(entries: Sequence[Any]) -> Any:
    if not any(isinstance(each, str) for each in entries):
        return np.int32(entries)
    return lambda n: np.int32([{"n": n, "m": 2 * n, "-n": -n}.get(each, each) for each in entries])


def _slices() -> list[Case]:
    cases = [
        _strided("nn3", [0, 0, 1], [0, 0, 3], begin=3, end=3),
        _strided("nn3", [0, 0, 2], ["n", "n", 0], [1, 1, -1]),
        _strided("nn3", [1, 0], ["n", "n"]),
        _strided("nn3", [0, 0], ["n", 2]),
        _strided("nn3", [0, 0], [0, 0], [2, 1], begin=3, end=3),
        _strided("n23", [0, 1], [0, 2], begin=1, end=1, shrink_axis=2),
        _strided("3nn", [2, 0, 0], [3, 0, 0], begin=6, end=6, shrink_axis=1),
        _strided("3n4", [0, 2], [0, 3], ellipsis=1, shrink_axis=2),
        _strided("n3n", [0, 0, 1], [0, 0, 3], ellipsis=2, begin=5, end=1),
        _strided("nn3", [0, 0, 0], [0, 0, 0], begin=7, end=7, new_axis=1),
        _strided("nn3", [0, 0, 0], [0, 0, 0], begin=7, end=7, new_axis=2, ellipsis=1),
        _strided("n3n", [0, 0, 1], [0, 0, 2], begin=3, end=3, new_axis=2, shrink_axis=4),
        _strided("n", [0], [0], [-1], begin=1, end=1),
        _strided("m2", [0], ["n"]),
        _strided("m2", ["n"], ["m"]),
        _strided("m2", ["n"], [0], end=1),
        _strided("m2", [0], ["n"], begin=1),
        _strided("m2", [1], ["n"]),
        _strided("m2", ["n"], ["n"]),
        _strided("m2", ["m"], ["n"]),
        _strided("2m", [0, 0], [2, "n"], begin=1, end=1),
        _strided("m2", [0], ["m"]),
        _strided_grad(["n", "n", 3], "nn2", [0, 0, 1], [0, 0, 3], begin=3, end=3),
        _strided_grad(["n", "n", 3], "nn", [0, 0, 1], [0, 0, 2], begin=3, end=3, shrink_axis=4),
        _strided_grad([3, "n", "n"], "nn", [2], [3], shrink_axis=1),
        _strided_grad([2, "n", 5], "2n1", [0, 1], [0, 2], end=0, ellipsis=1),
        _strided_grad(["n", "n"], "1nn", [0, 0], [0, 0], begin=3, end=3, new_axis=1),
        _strided_grad(["n", "n"], "nn", [0, 0], [0, 0], [-1, 1], begin=3, end=3),
        _strided_grad(["m", "n"], "nn", [0], ["n"]),
        _strided_grad([6, "n"], "3n", [0, 0], [6, "n"], [2, 1]),
    ]
    for shape, begin, size in (
        ("nn3", [0, 0, 1], [-1, -1, 2]),
        ("nn3", [0, 0, 0], ["n", "n", 2]),
        ("nn3", [0, 1, 0], [-1, -1, -1]),
        ("nn3", [0, 0, 2], [-1, 1, 1]),
        ("m2", [0, 1], ["m", 1]),
        ("m2", [0, 0], ["n", 2]),
    ):
        cases.append(Case("Slice", [f"{shape} f", _vector(begin), _vector(size)]))
    for shapes, axis in (
        (("nn", "nn"), 0), (("nn", "nn"), 1), (("n2n", "n1n"), 1), (("n2n", "n1n"), -2), (("mn", "nn"), 0),
        (("n2", "m2", "n2"), 0), (("2n", "2m"), -1), (("n3", "23"), 0), (("n2", "n2"), 1), (("nn", "1n"), 0),
        (("m2", "m2"), 1), (("n2", "02"), 0),
    ):  # fmt: skip
        cases.append(Case("ConcatV2", [*(f"{each} f" for each in shapes), np.int32(axis)]))
    for shape, axis, count in (("m2", 0, 2), ("m2", 1, 2), ("2m", -1, 2), ("nn4", 2, 2), ("nn4", -1, 4), ("2m", 0, 2)):
        cases.append(Case("Split", [np.int32(axis), f"{shape} f"], {"num_split": count}))
    for shape, sizes, axis in (
        ("m2", ["n", "n"], 0),
        ("m2", [1, 1], 1),
        ("n3", [1, 2], -1),
        ("2m", ["n", "n"], 1),
        ("n5", [2, 3], 1),
    ):
        cases.append(Case("SplitV", [f"{shape} f", _vector(sizes), np.int32(axis)], {"num_split": len(sizes)}))
    for shape, times in (("nn", [1, 2]), ("nn", [3, 1]), ("m2", [2, 3]), ("2n", [1, 1]), ("n", [0]), ("n", [2])):
        cases.append(Case("Tile", [f"{shape} f", np.int32(times)]))
    return cases


def _shapes() -> list[Case]:
    cases = []
    for shape, wanted in (
        ("nn", [-1]), ("nn", ["n", "n", 1]),
        ("nn", [1, "n", -1]), ("n23", [-1, 3]), ("n23", ["n", 6]), ("n23", [3, -1]),
        ("2n3", [-1, 3]), ("2n3", [2, -1]), ("2n3", [3, 2, -1]), ("m3", [2, "n", 3]), ("m3", ["n", 2, 3]),
        ("m3", ["n", 6]), ("m", [2, -1]), ("3m", [-1]), ("3m", [3, 2, "n"]), ("n", ["n", 1]), ("n1", ["n"]),
        ("n4", [2, "m"]), ("1n", ["n"]), ("n6", ["n", 2, 3]), ("n6", ["m", 3]), ("6n", [2, 3, -1]), ("n22", [4, "n"]),
    ):  # fmt: skip
        cases.append(Case("Reshape", [f"{shape} f", _vector(wanted)]))
    cases += [Case(kind, ["n2n f"]) for kind in ("Shape", "Size", "Rank")]
    return [*cases, Case("Shape", ["2m f"], {"out_type": np.int64})]


TOPICS = {"slices": _slices(), "shapes": _shapes()}
