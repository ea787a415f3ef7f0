"""The graphs that a Checkpoint writes for exports, as the export part writes them (parts.py: base_graphs)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_ddl import parts

Serve = str | Sequence[str] | Mapping[str, Any] | None


class BaseGraphs:
    """Writes base graphs on rank 0: none here, where the export part is not installed.

    Every method of the export part's is COLLECTIVE that does not say otherwise.

    Attributes:
        is_due: whether graphs are still to be written; equal on all ranks, because it decides about collectives.
    """

    is_due = False

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted

    def at_train_begin(self, model: Any) -> None:
        """Writes the graphs if all inputs are known."""
        if self._is_wanted:
            self._is_wanted = False
            warnings.warn(f"Checkpoint writes no base graph. {parts.why_missing('export')}", stacklevel=2)

    def write(self, model: Any) -> None:
        """Writes the graphs after a batch."""

    def answer(self, model: Any) -> None:
        """Finds out what the served models answer, where no rank has all of their weights."""

    def here(self, model: Any) -> list[Any]:
        """Returns the graphs written so far, on rank 0. Not collective."""
        return []

    def publisher(self, checkpoints: Path, directory: Path, keep: int) -> Any:
        """Returns what exports checkpoints to versions in `directory`. On rank 0; not collective."""
        raise AssertionError("publish_to is refused without the export part")

    def wait_for(self, publisher: Any) -> None:
        """Waits until all is published. `publisher`: on rank 0."""


def base_graphs(dir: Path | None, serve: Serve, options: Mapping[str, Any], *, publishes: bool) -> BaseGraphs:
    """Returns the writer of a Checkpoint's base graphs.

    Args:
        dir: the checkpoint directory; None if no graph is wanted.
        serve, options: as in `callbacks.Checkpoint`. publishes: whether checkpoints are published, too.
    Raises:
        ConfigError: serve or an option has another form.
        DependencyError: one of them is given, and the export part is not installed.
    """
    for written in parts.provided("base_graphs"):
        return written(dir, serve, options)
    if serve is not None or publishes or any(value is not None for value in options.values()):
        parts.need("export")
    return BaseGraphs(is_wanted=dir is not None)
