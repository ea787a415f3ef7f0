"""Compares tensors of one process and of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TOLERANCE = 1e-12  # for float64; scaled up for float32
_OF_HALVES = 0.02


def difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float = TOLERANCE) -> str | None:
    """Describes how two lists of tensors differ, or returns None if they do not."""
    for index, (got, want) in enumerate(zip(found, expected, strict=True)):
        got, want = np.asarray(got), np.asarray(want)
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"output {index}: {got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}"
        if want.dtype.kind in "biuSO":
            if not np.array_equal(got, want):
                return f"output {index}: {got.tolist()} for {want.tolist()}"
            continue
        finite = np.isfinite(want)
        if not np.array_equal(np.where(finite, 0, want), np.where(np.isfinite(got), 0, got), equal_nan=True):
            return f"output {index}: {got.tolist()} for {want.tolist()}"
        largest = np.max(np.abs(want[finite]), initial=1.0)
        coarser = np.finfo(want.dtype).eps / np.finfo(np.float64).eps
        bound = largest * (tolerance * coarser if want.dtype.itemsize > 2 else max(tolerance, _OF_HALVES))
        worst = np.max(np.abs(got[finite] - want[finite]), initial=0.0)
        if worst > bound:
            return f"output {index}: differs by {worst} of {largest}"
    return None
