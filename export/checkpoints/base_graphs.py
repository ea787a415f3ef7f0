"""Writes the base graphs of the model or its parts, which exports need, as soon as the inputs are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_ddl import export
from keras_ddl.checkpoint import Checkpoint
from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.models import is_built, layers_of
from keras_ddl.errors import ExportError
from keras_ddl.export.checkpoints.answers_of_ranks import AnswersOfRanks
from keras_ddl.export.checkpoints.callbacks import ExportBase, Publish
from keras_ddl.export.checkpoints.publisher import Publisher, wait_for
from keras_ddl.export.tracing.tracer import Elsewhere
from keras_ddl.strategy.shards import gathered_slots


class BaseGraphs:
    """Writes base graphs on rank 0. Every method is COLLECTIVE unless it says otherwise.

    Attributes:
        is_due: whether graphs must still be written; equal on all ranks, because collectives depend on it.
        is_written: whether the graphs were written; equal on all ranks.
    """

    def __init__(self, dir: Path | None) -> None:
        """`dir`: the checkpoint directory; None: write no graph."""
        self._dir = dir
        self._settings = ExportBase()
        self._publish: Publish | None = None
        self._publisher: Publisher | None = None  # on rank 0 only
        self._forget()

    def _forget(self) -> None:
        self.is_written = self.is_due = False
        self._written: list[Any] = []  # graphs written by this process
        self._ranks: dict[str | None, AnswersOfRanks] = {}  # for a model whose weights are split between ranks
        self._elsewhere: dict[str | None, Elsewhere] = {}
        self._answers: dict[str | None, Mapping[str, Any] | None] = {}

    def follow(self, callbacks: Sequence[Any]) -> None:
        """Takes the settings of ExportBase and Publish among the callbacks of a fit. On all ranks; not collective."""
        settings = next((each for each in callbacks if isinstance(each, ExportBase)), None)
        if settings is not None and settings is not self._settings:
            self._settings = settings
            self._forget()
        publish = next((each for each in callbacks if isinstance(each, Publish)), None)
        if publish is not self._publish:
            self._publish, self._publisher = publish, None

    def at_train_begin(self, model: Any) -> None:
        """Writes the graphs if all inputs are known.

        Raises: ExportError, on every rank: the model cannot be served, or has no call() and no part is named.
        """
        self.is_due = self._dir is not None and not self.is_written
        if not self.is_due:
            return
        if on_first_rank(lambda: self._are_ready_at_begin(model), "Checkpoint/inputs"):
            self._write(model)
            return
        for part in self._served(model).values():  # on all ranks: any may become rank 0
            export.record_inputs(part)

    def write(self, model: Any) -> None:
        """Writes the graphs after a batch. Raises: ExportError, on every rank: the step has not called a part."""
        on_first_rank(lambda: self._refuse_uncalled(model), "Checkpoint/inputs")
        self._write(model)

    def prepare_publishing(self) -> None:
        """Makes the directories of versions, if a Publish is among the callbacks. On rank 0; not collective.

        Raises: ExportError: a directory cannot be written.
        """
        if self._publish is None or self._publisher is not None or self._dir is None:  # Publish itself refuses dir=None
            return
        versions: dict[str | None, Path] = {None: self._publish.dir}
        if not self._settings.is_single:
            versions = {name: self._publish.dir / name for name in self._settings.parts if name is not None}
        self._publisher = Publisher(self._dir, versions, self._publish.keep)

    def publish(self, checkpoint: Checkpoint) -> None:
        """Publishes a checkpoint, after the current one. Returns at once. On rank 0; not collective."""
        if self._publisher is not None and self._written:
            self._publisher.offer(checkpoint)

    def wait(self) -> None:
        """Waits until all offered checkpoints are published."""
        if self._publish is not None:
            wait_for(self._publisher)

    def here(self, model: Any) -> list[Any]:
        """Returns rank 0's graphs so far. A rank that has become rank 0 writes them again. Not collective."""
        if self.is_written and not self._written:
            self._write_here(model)
        is_spread = bool(gathered_slots.spread_in(model.variables))
        for base in self._written:
            base.runs_elsewhere, base.answers = is_spread, self._answers.get(base.name)
        return self._written

    def _are_ready_at_begin(self, model: Any) -> bool:
        served = self._served(model)
        if list(self._settings.parts) == [None]:
            _refuse_without_call(model)
            model_is_built = model.built
        else:
            model_is_built = all(layer.built for layer in layers_of(model)[1:])
        ready = [name for name, part in served.items() if part.built and self._inputs_are_known(name, part)]
        return model_is_built and len(ready) == len(served)

    def _inputs_are_known(self, name: str | None, part: Any) -> bool:
        is_set = any(self._settings.options[name][option] is not None for option in ("input_signature", "sample"))
        return is_set or export.inputs_are_known(part)

    def _refuse_uncalled(self, model: Any) -> None:
        for name, part in self._served(model).items():
            if is_built(part) and self._inputs_are_known(name, part):
                continue
            which = f"{model.name!r}" if name is None else f"serve={name!r}"
            parts = (
                f" Pass callbacks.ExportBase(serve={_candidates(model)}), or some of these, to serve parts of it."
                * (name is None)
            )
            raise ExportError(
                "Checkpoint traces the graph for `keras-ddl export` with the inputs that the model gets in training. "
                f"Received: {which}, which the first training step did not call.{parts} Pass "
                "callbacks.ExportBase(sample=...) to serve it anyway, or Checkpoint(export_base=False) to skip the "
                "graph."
            )

    def _served(self, model: Any) -> dict[str | None, Any]:
        """Returns name -> part of the model; the name None stands for the whole model."""
        return {
            name: model if name is None else _find(model, name, part) for name, part in self._settings.parts.items()
        }

    def answer(self, model: Any) -> None:
        """Computes the served models' outputs for the next checkpoint, if no rank has all of their weights."""
        self._answers = {}
        if self.is_written and gathered_slots.spread_in(model.variables):
            self._run_on_ranks(model)
            self._answers = {name: each.answer() for name, each in self._ranks.items()}

    def _write(self, model: Any) -> None:
        self.is_due = False
        if gathered_slots.spread_in(model.variables):
            self._run_on_ranks(model)
        on_first_rank(lambda: self._write_here(model), "Checkpoint/base")
        self.is_written = True

    def _run_on_ranks(self, model: Any) -> None:
        if not self._ranks:
            parts = self._served(model).items()
            self._ranks = {name: AnswersOfRanks(model, part, self._settings.options[name]) for name, part in parts}
            self._elsewhere = {name: each.elsewhere() for name, each in self._ranks.items()}

    def _write_here(self, model: Any) -> None:
        assert self._dir is not None
        spread = [each for each in model.variables if gathered_slots.spread_in([each])]
        for name, part in self._served(model).items():
            whole = None if name is None else model
            # If the first step chose a layout, the weights may have been split after the graph was first written.
            elsewhere = self._elsewhere.get(name, Elsewhere(None, (), spread)) if spread else None
            with gathered_slots.without_values(gathered_slots.slots_in(spread)):
                base = export.write_base_graph(
                    part, self._dir, name=name, whole=whole, elsewhere=elsewhere, **self._settings.options[name]
                )
            for sentence in base.warnings:
                stack_position.warn(sentence)
            self._written.append(base)


def _find(model: Any, name: str, part: Any) -> Any:
    layer: Any = part
    if isinstance(part, str):
        layer = model
        for attribute in part.split("."):
            layer = getattr(layer, attribute, None)
    if not isinstance(layer, keras.layers.Layer):
        raise ExportError(
            f"serve must name models that are attributes of the model in training. Received: {name!r}, which is "
            f"{type(layer).__name__} in {type(model).__name__} {model.name!r}. It has {_candidates(model)}."
        )
    return layer


def _candidates(model: Any) -> list[str]:
    """Returns the attributes of a model that are models, or if there are none, the attributes that are layers."""
    for kind in (keras.Model, keras.layers.Layer):
        names = [name for name, each in vars(model).items() if isinstance(each, kind) and not name.startswith("_")]
        if names:
            return names
    return []


def _refuse_without_call(model: Any) -> None:
    if type(model).call is keras.Model.call:
        raise ExportError(
            f"Checkpoint writes a servable graph of the model for `keras-ddl export`. Received: "
            f"{type(model).__name__} {model.name!r}, which has no call(). Pass "
            f"callbacks.ExportBase(serve={_candidates(model)}), or some of these, to serve parts of it, or "
            "Checkpoint(export_base=False) to skip the graph."
        )
