"""Which calls of a model are so short that handing them to another thread would cost more than they do."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

SHORT_SECONDS = 0.001
_LONG_SECONDS = 0.01  # what other requests notice
_SHARE = 0.01  # of its time that the event loop may lose to wrong guesses of so long
# Loops, and what waits for something else: these may take long whatever the size of their inputs.
_OF_UNKNOWN_LENGTH = re.compile(
    r"While|^(Ref)?Enter$|Queue|Barrier|Stage|Iterator|Dataset|Reader|^ReadFile$|PyFunc|Recv$|BatchFunction"
)


class Pace:
    """Learns up to which size of inputs a call is short.

    A wrong guess costs the event loop one such call: values can ask for much, as sizes of what is made, in few bytes.
    So the longer it took, the longer no other guess is made, whoever sends what.

    Strings are of no size that says anything, and a graph with loops or queues of no length: these are never short.
    """

    def __init__(self, operations: Iterable[str]) -> None:
        """`operations`: the names of all operations of the graph and its functions."""
        self._bounded = not any(map(_OF_UNKNOWN_LENGTH.search, operations))
        self._short_bytes: dict[Any, int] = {}
        self._pause_ends = 0.0

    def is_short(self, call: Any, feeds: Mapping[str, np.ndarray]) -> bool:
        """Whether `call` (any key that is one for a function of the model) will be short."""
        is_small = self._bounded and _size(feeds) <= self._short_bytes.get(call, -1)
        return is_small and time.monotonic() >= self._pause_ends

    def learn(self, call: Any, feeds: Mapping[str, np.ndarray], seconds: float) -> None:
        """Takes note of what a call has taken."""
        if not self._bounded:
            return
        size, known = _size(feeds), self._short_bytes.get(call, -1)
        if seconds > SHORT_SECONDS:
            if size <= known and seconds > _LONG_SECONDS:
                self._pause_ends = max(self._pause_ends, time.monotonic() + seconds / _SHARE)
            self._short_bytes[call] = min(known, size // 2)
        elif size < math.inf:
            self._short_bytes[call] = max(known, int(size))


def _size(feeds: Mapping[str, np.ndarray]) -> float:
    """Bytes; infinite if there are strings."""
    return sum(math.inf if each.dtype.hasobject else each.nbytes for each in feeds.values())
