"""Boxes: parts of an array, `((first, extent), ...)` along its axes. The box of a scalar is ()."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from keras_ddl.cut.values.layouts import Box


def size(box: Box) -> int:
    """Returns the number of entries."""
    return math.prod(extent for _, extent in box)


def intersection(one: Box, other: Box) -> Box | None:
    """Returns the box of the entries that both boxes have in common; None if there are none."""
    common = []
    for (first, extent), (begin, length) in zip(one, other):
        start, end = max(first, begin), min(first + extent, begin + length)
        if end <= start:
            return None
        common.append((start, end - start))
    return tuple(common)


def without(box: Box, other: Box) -> list[Box]:
    """Returns the entries of `box` that `other` lacks, as disjoint boxes: at most two for each axis."""
    common = intersection(box, other)
    if common is None:
        return [box]
    rest: list[Box] = []
    left = list(box)
    for axis, ((first, extent), (begin, length)) in enumerate(zip(box, common)):
        for start, end in ((first, begin), (begin + length, first + extent)):
            if end > start:
                rest.append((*left[:axis], (start, end - start), *box[axis + 1 :]))
        left[axis] = (begin, length)
    return rest


def without_all(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """Returns the entries of `boxes` that all of `others` lack, as disjoint boxes."""
    seen, rest = list(others), []
    for box in boxes:
        left = [box] if size(box) else []
        for other in seen:
            left = [piece for each in left for piece in without(each, other)]
        rest += left
        seen.append(box)
    return rest


def index(box: Box, within: Box) -> tuple[slice, ...]:
    """Returns the slices that select `box` from an array of the entries of `within`."""
    return tuple(slice(first - begin, first - begin + extent) for (first, extent), (begin, _) in zip(box, within))


def split(entries: np.ndarray, boxes: Sequence[Box]) -> list[np.ndarray]:
    """Splits the concatenated entries of boxes into one array per box: views, if `entries` is contiguous."""
    flat, arrays, end = entries.reshape(-1), [], 0
    for box in boxes:
        begin, end = end, end + size(box)
        arrays.append(flat[begin:end].reshape([extent for _, extent in box]))
    return arrays


def joined(boxes: Sequence[Box], arrays: Mapping[Box, np.ndarray], dtype: Any) -> np.ndarray:
    """Returns the concatenated entries of `boxes` as a new vector, copied from `arrays`, which together have them."""
    import numpy as np  # here, because listing checkpoints needs no NumPy

    result = np.empty(sum(map(size, boxes)), dtype)
    for box, target in zip(boxes, split(result, boxes)):
        for other, array in arrays.items():
            common = intersection(box, other)
            if common is not None:
                target[index(common, box)] = array[index(common, other)]
    return result
