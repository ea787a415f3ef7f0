"""Predicts which calls of a model are so short that handing them to another thread would cost more than the call."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

SHORT_SECONDS = 0.001
_LONG_SECONDS = 0.01  # long enough for other requests to notice
_MAX_LOSS = 0.01  # of its time that the event loop may lose to wrong predictions that long
# Loops, and ops that wait for something else: these may take long whatever the size of their inputs.
_UNBOUNDED_OPS = re.compile(
    r"While|^(Ref)?Enter$|Queue|Barrier|Stage|Iterator|Dataset|Reader|^ReadFile$|PyFunc|Recv$|BatchFunction"
)


class CallTimes:
    """Learns up to which size of inputs a call is short.

    A wrong prediction costs the event loop one long call: a few bytes of input can request much work, as sizes of
    outputs do. So the longer such a call took, the longer no call is predicted to be short.

    The size of strings says nothing, nor does that of inputs to loops or queues: such calls are never predicted to be
    short.
    """

    def __init__(self, operations: Iterable[str]) -> None:
        """`operations`: the names of all operations of the graph and its functions."""
        self._bounded = not any(map(_UNBOUNDED_OPS.search, operations))
        self._short_bytes: dict[Any, int] = {}
        self._pause_ends = 0.0

    def is_short(self, call: Any, feeds: Mapping[str, np.ndarray]) -> bool:
        """Whether `call` (any key that is one for a function of the model) will be short."""
        is_small = self._bounded and _size(feeds) <= self._short_bytes.get(call, -1)
        return is_small and time.monotonic() >= self._pause_ends

    def record(self, call: Any, feeds: Mapping[str, np.ndarray], seconds: float) -> None:
        """Records how long a call took."""
        if not self._bounded:
            return
        size, known = _size(feeds), self._short_bytes.get(call, -1)
        if seconds > SHORT_SECONDS:
            if size <= known and seconds > _LONG_SECONDS:
                self._pause_ends = max(self._pause_ends, time.monotonic() + seconds / _MAX_LOSS)
            self._short_bytes[call] = min(known, size // 2)
        elif size < math.inf:
            self._short_bytes[call] = max(known, int(size))


def _size(feeds: Mapping[str, np.ndarray]) -> float:
    """Bytes; infinite if there are strings."""
    return sum(math.inf if each.dtype.hasobject else each.nbytes for each in feeds.values())
