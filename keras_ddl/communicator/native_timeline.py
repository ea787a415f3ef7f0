"""The timeline of the native core as Python calls."""

from __future__ import annotations

import ctypes

from keras_ddl.communicator.native_library import ERROR_BYTES, core


def start(path: str, rank: int, label: str) -> str:
    """Starts this process's timeline; returns "" or what is wrong."""
    message = ctypes.create_string_buffer(ERROR_BYTES)
    core().ddl_trace_start(path.encode(), rank, label.encode(), message, ERROR_BYTES)
    return message.value.decode(errors="replace")


def stop() -> str:
    """Ends the timeline; returns "" or what is wrong."""
    message = ctypes.create_string_buffer(ERROR_BYTES)
    core().ddl_trace_stop(message, ERROR_BYTES)
    return message.value.decode(errors="replace")


def span(name: str, begin: float, end: float) -> None:
    """Adds a span to the timeline. Seconds of time.monotonic()."""
    core().ddl_trace_span(name.encode(), begin, end)
