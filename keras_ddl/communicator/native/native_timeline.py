"""Writes the timeline of this process through the native core, and reads its newest collectives."""

from __future__ import annotations

import ctypes

from keras_ddl.communicator.native.native_library import ERROR_BYTES, Traced, core


def start(path: str, rank: int, label: str) -> str:
    """Starts the timeline of this process; returns an error message, or "" on success."""
    message = ctypes.create_string_buffer(ERROR_BYTES)
    core().ddl_trace_start(path.encode(), rank, label.encode(), message, ERROR_BYTES)
    return message.value.decode(errors="replace")


def stop() -> str:
    """Ends the timeline; returns an error message, or "" on success."""
    message = ctypes.create_string_buffer(ERROR_BYTES)
    core().ddl_trace_stop(message, ERROR_BYTES)
    return message.value.decode(errors="replace")


def span(name: str, begin: float, end: float) -> None:
    """Adds a span to the timeline. `begin`, `end`: seconds of time.monotonic()."""
    core().ddl_trace_span(name.encode(), begin, end)


def keep(capacity: int) -> None:
    """From now on, keeps the newest `capacity` collectives in memory for `take`; 0: none."""
    core().ddl_trace_keep(capacity)


def take() -> list[tuple[str, int, float, float, float, float]]:
    """Removes and returns the collectives in memory: (name, bytes, submitted, agreed, started, finished).

    Times are seconds of time.monotonic().
    """
    taken: list[tuple[str, int, float, float, float, float]] = []
    some = (Traced * 256)()
    while count := core().ddl_trace_take(some, len(some)):
        taken += (
            (one.name.decode(errors="replace"), one.bytes, one.submitted, one.agreed, one.started, one.finished)
            for one in some[:count]
        )
    return taken
