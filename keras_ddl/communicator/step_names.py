"""Names a step's collectives. A name encodes the collective's role, because a timeline has no other field for it."""

from __future__ import annotations

import re
from typing import NamedTuple

ROWS, NEEDED_ROWS, COMMIT = "rows", "needed_rows", "commit"
_ARGUMENT, _VALUE = "argument", "value"
_AFTER = re.compile(r"(?:.*/)?after_\d+/")
_WHOLE = re.compile(rf"(?P<{ROWS}>rows(?:_\d+)?)|(?P<{NEEDED_ROWS}>needed_rows(?:_\d+)?)|(?P<{_ARGUMENT}>.*/batch_\d+)")


def after(scope: str, rounds: int) -> str:
    """Returns the prefix for collectives that may wait for `rounds` rounds of earlier collectives."""
    return f"{scope}after_{rounds}/" if rounds else scope


def argument(scope: str, place: int) -> str:
    """Returns the name for gathering the rows of an argument of a step."""
    return f"{scope}/batch_{place}"


class Role(NamedTuple):
    """The purpose of a collective.

    Attributes:
        kind: ROWS: the exchange of rows, with which a step begins when its batch is ready. If the rows of a batch are
            known before, no rank waits for it, except in the few steps whose batch is compared; NEEDED_ROWS: they are
            not known. COMMIT: the end of a step. Others: rows of an argument, or values that the step computes.
        round: equal for collectives that run while inputs of the others are computed.
        trains: whether it belongs to a train_step.
    """

    kind: str
    round: str
    trains: bool

    @property
    def begins_step(self) -> bool:
        return self.kind in (ROWS, NEEDED_ROWS)


def role_of(name: str) -> Role:
    """Returns the role of the collective with this name."""
    body, _, iteration = name.partition("#")
    whole, later = _WHOLE.fullmatch(body), _AFTER.match(body)
    kind = (whole and whole.lastgroup) or (COMMIT if body.endswith(f"/{COMMIT}") else _VALUE)
    round_ = later[0] if later else body if whole else ""
    return Role(kind, round_ + iteration, "/train_step/" in body)
