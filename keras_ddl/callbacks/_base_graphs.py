"""The graphs that a Checkpoint writes for exports; the export part implements this (parts.py: base_graphs)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_ddl import parts
from keras_ddl.checkpoint import Checkpoint


class BaseGraphs:
    """Writes base graphs on rank 0 and publishes checkpoints. Without the export part, this base class does nothing.

    In the export part's class every method is COLLECTIVE unless it says otherwise.

    Attributes:
        is_due: whether graphs have yet to be written; equal on all ranks, because collectives depend on it.
    """

    is_due = False

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted

    def follow(self, callbacks: Sequence[Any]) -> None:
        """Reads the settings of ExportBase and Publish among the callbacks of a fit. On all ranks; not collective."""

    def prepare_publishing(self) -> None:
        """Makes the directories of versions. On rank 0; not collective."""

    def at_train_begin(self, model: Any) -> None:
        """Writes the graphs if all inputs are known."""
        if self._is_wanted:
            self._is_wanted = False
            warnings.warn(f"Checkpoint writes no base graph. {parts.why_missing('export')}", stacklevel=2)

    def write(self, model: Any) -> None:
        """Writes the graphs after a batch."""

    def answer(self, model: Any) -> None:
        """Computes the served models' outputs if no rank has all of their weights."""

    def here(self, model: Any) -> list[Any]:
        """Returns the graphs written so far, on rank 0. Not collective."""
        return []

    def publish(self, checkpoint: Checkpoint) -> None:
        """Publishes a checkpoint. Returns at once. On rank 0; not collective."""

    def wait(self) -> None:
        """Waits until everything is published."""


def base_graphs(dir: Path | None) -> BaseGraphs:
    """Returns the writer of a Checkpoint's base graphs. `dir`: the checkpoint directory; None: no graphs are wanted."""
    for written in parts.provided("base_graphs"):
        return written(dir)
    return BaseGraphs(is_wanted=dir is not None)
