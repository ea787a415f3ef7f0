"""Compares a program's results under a strategy with its results in one process of the same backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

EQUAL, DRAWS, WRONG, REFUSED, CRASHED, HUNG, NONE = KINDS = (
    "equal",  # within the tolerance
    "draws differ",  # equal without its random layers; with them it draws other numbers
    "wrong",  # runs to its end with different values, and no process raises an error
    "refused",  # an error in Python
    "crashed",  # a process died
    "hung",  # did not end within the time limit
    "-",  # one process of this backend cannot run it, or the peer's documentation has no way to
)
DRAWN = "drawn "  # prefix of the label of a value that depends on random numbers
NOT_OFFERED = "NotOffered"  # the error type of a peer that documents no way to run a program


@dataclass
class Outcome:
    """The outcome of a program in one process.

    Attributes:
        values: label ("weight 0 kernel", "log loss", "predictions") -> array.
        error: type and first line of the exception, or empty.
        ended: EQUAL for a program that ended normally or with an error; CRASHED; HUNG.
        warned: first lines of warnings by Python and TensorFlow's logger.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    error: str = ""
    ended: str = EQUAL
    warned: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Verdict:
    kind: str  # one of KINDS
    detail: str = ""  # the first line of an error, or what differs most
    gap: float = 0.0  # the largest relative difference

    def cell(self) -> str:
        return f"{self.kind} {self.gap:.0e}" if self.kind == WRONG else self.kind


def judge(expected: Outcome, seen: Sequence[Outcome], tolerance: float = 1e-9, logs: bool = True) -> Verdict:
    """Compares the outcomes of all processes of a peer with the outcome of one process.

    Args:
        expected: the outcome in one process of the same backend.
        seen: the outcomes in the peer's processes.
        tolerance: largest allowed difference of a weight relative to the largest weight of the model, and of any other
            value relative to that value's largest entry.
        logs: False: compare only weights, because the peer has no logs.
    """
    if expected.error or expected.ended != EQUAL:
        return Verdict(NONE, f"one process: {expected.error or expected.ended}")
    errors = [each.error for each in seen if each.error]
    if any(error.startswith(NOT_OFFERED) for error in errors):
        return Verdict(NONE, errors[0].removeprefix(f"{NOT_OFFERED}: "))
    if errors:
        return Verdict(REFUSED, errors[0] + (" (another process hangs)" if any(e.ended == HUNG for e in seen) else ""))
    for kind in (CRASHED, HUNG):
        if any(each.ended == kind for each in seen):
            return Verdict(kind)
    gaps = {label: gap for each in seen for label, gap in _gaps(expected.values, each.values, logs) if gap > tolerance}
    warned = [line for each in seen for line in each.warned if line not in expected.warned]
    if not gaps:
        return Verdict(EQUAL)
    warning = f" (warned: {warned[0]})" if warned else ""
    if all(label.startswith(DRAWN) for label in gaps):
        return Verdict(DRAWS, warning.strip(), max(gaps.values()))
    gaps = {label: gap for label, gap in gaps.items() if not label.startswith(DRAWN)}
    weights = [label for label in gaps if label.startswith("weight")]
    worst = max(weights or gaps, key=lambda label: gaps[label])
    where = f"{worst} is" if weights else f"weights are equal, {worst} is"
    return Verdict(WRONG, f"{where} off by {gaps[worst]:.1e}{warning}", gaps[worst])


def _gaps(expected: dict[str, np.ndarray], values: dict[str, np.ndarray], logs: bool) -> list[tuple[str, float]]:
    """Returns the relative difference of each value: infinity if it is missing, has another shape, or is NaN."""
    compared = [label for label in expected if logs or "weight" in label]
    extra = [(label, np.inf) for label in values if label not in expected and logs]
    if not compared:
        return [("nothing", np.inf)]
    drawn = [label.startswith(DRAWN) for label in compared]
    largest = {
        each: max((_largest(expected[k]) for k, d in zip(compared, drawn) if d == each and "weight" in k), default=0.0)
        for each in set(drawn)
    }
    found = []
    for label, is_drawn in zip(compared, drawn):
        scale = largest[is_drawn] if "weight" in label else _largest(expected[label])
        found.append((label, _gap(expected[label], values.get(label), scale)))
    return found + extra


def _largest(value: np.ndarray) -> float:
    return float(np.nanmax(np.abs(value))) if value.size and not np.isnan(value).all() else 0.0


def _gap(expected: np.ndarray, value: np.ndarray | None, scale: float) -> float:
    if value is None or value.shape != expected.shape:
        return np.inf
    differ = (value != expected) & ~(np.isnan(value) & np.isnan(expected))
    if not differ.any():
        return 0.0
    difference = float(np.max(np.abs(value[differ] - expected[differ])))
    if not np.isfinite(difference):
        return np.inf
    return difference / scale if scale else np.inf
