"""Pauses Python's search for cyclic garbage while a step is traced, cut and run for the first time.

These phases make hundreds of thousands of lasting objects, so that Python would search all objects of the process
again. With TensorFlow that takes 0.3 s and finds nothing to free.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pauses cyclic garbage collection in all threads within the block, unless the program collects explicitly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
