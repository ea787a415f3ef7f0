"""Waits for conditions."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only a hang takes longer.
LIMIT_SECONDS = 300


def eventually(condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> bool:
    """Waits at most `seconds` until `condition` holds; returns whether it does."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds or condition())
