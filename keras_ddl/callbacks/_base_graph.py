"""The graph that exports need: written once, as soon as the model's inputs are known."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_ddl import export
from keras_ddl.callbacks._first_rank import is_first_rank, on_first_rank


class BaseGraph:
    """Has rank 0 write the base graph. Every method is COLLECTIVE."""

    def __init__(self, dir: Path | None, options: Mapping[str, Any]) -> None:
        """
        Args:
            dir: the checkpoint directory; None if no graph is wanted.
            options: as `export.write_base_graph`.
        """
        self._dir, self._options = dir, options
        self._is_written = False
        self.is_due = False  # on all ranks: it decides which collectives come
        self.written: Any = None  # on rank 0: the graph, once it is there

    def at_train_begin(self, model: Any) -> None:
        """Writes it if the inputs are known already: a model that cannot be served fails here.

        Raises: ExportError, on every rank.
        """
        self.is_due = self._dir is not None and not self._is_written
        if self.is_due and self._agree_on_inputs(model):
            self._write(model)

    def write_if_possible(self, model: Any) -> None:
        """After a batch: writes it, unless the training step has not called the model; then none is due any more."""
        if self._agree_on_inputs(model):
            self._write(model)
            return
        self.is_due = False
        if is_first_rank():
            warnings.warn(
                "Checkpoint writes the graph that `keras-ddl export` needs from the inputs that the model is called "
                f"with in training. Received: {model.name!r}, whose training step has not called it. Checkpoints are "
                "written without that graph. Pass sample= or input_signature= if the model itself is to be served, or "
                "export_base=False.",
                stacklevel=2,
            )

    def _agree_on_inputs(self, model: Any) -> bool:
        return on_first_rank(lambda: self._inputs_are_ready(model), "Checkpoint/inputs")

    def _inputs_are_ready(self, model: Any) -> bool:
        given = any(self._options[name] is not None for name in ("input_signature", "sample"))
        if model.built and (given or export.inputs_are_known(model)):
            return True
        export.record_inputs(model)
        return False

    def _write(self, model: Any) -> None:
        self.is_due = False
        on_first_rank(lambda: self._write_here(model), "Checkpoint/base")
        self._is_written = True

    def _write_here(self, model: Any) -> None:
        self.written = export.write_base_graph(model, self._dir, **self._options)
        for sentence in self.written.warnings:
            warnings.warn(sentence, stacklevel=2)
