"""Waits for conditions."""

from __future__ import annotations

import time
from collections.abc import Callable

# What only a hang exceeds.
LIMIT_SECONDS = 300


def eventually(condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> bool:
    """Waits until `condition` holds; returns whether it does, at most `seconds` later."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds or condition())
