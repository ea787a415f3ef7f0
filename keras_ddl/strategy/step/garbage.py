"""Pauses Python's search for cyclic garbage while a step is traced, cut and run for the first time.

That makes hundreds of thousands of objects that stay. Python takes them for a reason to look at all objects of the
process again: 0.3 s in one with TensorFlow, and there is nothing to free.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, no thread of the process collects cyclic garbage, unless the program does so explicitly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
