"""The graphs that exports need: of the model, or of parts of it; written once, as soon as their inputs are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_ddl import export
from keras_ddl.communicator import stack_position
from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.compat.models import is_built, layers_of
from keras_ddl.errors import ConfigError, ExportError

Serve = str | Sequence[str] | Mapping[str, Any] | None


class BaseGraphs:
    """Has rank 0 write the base graphs. Every method is COLLECTIVE.

    Attributes:
        is_due: on all ranks, whether some are still to be written: it decides which collectives come.
        written: on rank 0, those that are there.
        names: of the parts to be served; [None] for the model itself.
    """

    def __init__(self, dir: Path | None, serve: Serve, options: Mapping[str, Any]) -> None:
        """
        Args:
            dir: the checkpoint directory; None if no graph is wanted.
            serve: as `callbacks.Checkpoint`.
            options: as `export.write_base_graph`; of several parts, name -> what it is for that part.
        Raises: ConfigError: serve, or an option, is of another kind.
        """
        self._dir = dir
        self._parts = _parts(serve)
        self.names = list(self._parts)
        self.is_single = serve is None or isinstance(serve, str)
        self._options = {name: _options_of(name, self.names, self.is_single, options) for name in self.names}
        self._is_written = self.is_due = False
        self.written: list[Any] = []

    def at_train_begin(self, model: Any) -> None:
        """Writes them if the inputs are known already: a model that cannot be served fails here.

        Raises: ExportError, on every rank; also if the model has no call() and no part of it is named.
        """
        self.is_due = self._dir is not None and not self._is_written
        if self.is_due and on_first_rank(lambda: self._are_ready_at_begin(model), "Checkpoint/inputs"):
            self._write(model)

    def write(self, model: Any) -> None:
        """After a batch: writes them. Raises: ExportError, on every rank: the step has not called what is served."""
        on_first_rank(lambda: self._refuse_what_was_not_called(model), "Checkpoint/inputs")
        self._write(model)

    def _are_ready_at_begin(self, model: Any) -> bool:
        served = self._served(model)
        if self.names == [None]:
            _refuse_without_call(model)
            whole_is_built = model.built
        else:
            whole_is_built = all(layer.built for layer in layers_of(model)[1:])
        ready = [name for name, part in served.items() if part.built and self._inputs_are_known(name, part)]
        if whole_is_built and len(ready) == len(served):
            return True
        for part in served.values():
            export.record_inputs(part)
        return False

    def _inputs_are_known(self, name: str | None, part: Any) -> bool:
        given = any(self._options[name][option] is not None for option in ("input_signature", "sample"))
        return given or export.inputs_are_known(part)

    def _refuse_what_was_not_called(self, model: Any) -> None:
        for name, part in self._served(model).items():
            if is_built(part) and self._inputs_are_known(name, part):
                continue
            which = f"{model.name!r}" if name is None else f"serve={name!r}"
            parts = f" Pass serve={_candidates(model)}, or some of them, if parts of it are to be served." * (
                name is None
            )
            raise ExportError(
                "Checkpoint writes the graph that `keras-ddl export` needs from the inputs that the model is called "
                f"with in training. Received: {which}, which the first training step has not called.{parts} Pass "
                f"sample= or input_signature= to serve it all the same, or export_base=False to go without."
            )

    def _served(self, model: Any) -> dict[str | None, Any]:
        """Returns name -> the part of the model, None -> the model itself."""
        return {name: model if name is None else _find(model, name, part) for name, part in self._parts.items()}

    def _write(self, model: Any) -> None:
        self.is_due = False
        on_first_rank(lambda: self._write_here(model), "Checkpoint/base")
        self._is_written = True

    def _write_here(self, model: Any) -> None:
        assert self._dir is not None
        for name, part in self._served(model).items():
            whole = None if name is None else model
            base = export.write_base_graph(part, self._dir, name=name, whole=whole, **self._options[name])
            for sentence in base.warnings:
                stack_position.warn(sentence)
            self.written.append(base)


def _parts(serve: Serve) -> dict[str | None, Any]:
    """Returns name -> attribute of the model, or the part itself."""
    if serve is None:
        return {None: None}
    named = {serve: serve} if isinstance(serve, str) else serve
    if not isinstance(named, Mapping):
        named = {name: name for name in named} if isinstance(named, (list, tuple)) else {}
    right: dict[str | None, Any] = {name: part for name, part in named.items() if export.is_name(name)}
    kinds = (str, keras.layers.Layer)
    if not right or len(right) < len(named) or not all(isinstance(part, kinds) for part in right.values()):
        raise ConfigError(
            "serve names what is to be served: an attribute of the model, a list of them, or name -> attribute or "
            f"layer, with names of letters, digits, '_' and '-'. Received: serve={serve!r}. Say "
            "serve={'encoder': 'student.encoder'}, for example, for a part of a part."
        )
    return right


def _options_of(
    name: str | None, names: Sequence[str | None], is_single: bool, options: Mapping[str, Any]
) -> dict[str, Any]:
    if is_single:
        return dict(options)
    for option, value in options.items():
        if value is not None and not (isinstance(value, Mapping) and set(value) <= set(names)):
            raise ConfigError(
                f"With several parts in serve, {option} is a mapping of their names, {names}, to what it is for each. "
                f"Received: {list(value) if isinstance(value, Mapping) else type(value).__name__}."
            )
    return {option: None if value is None else value.get(name) for option, value in options.items()}


def _find(model: Any, name: str, part: Any) -> Any:
    found: Any = part
    if isinstance(part, str):
        found = model
        for attribute in part.split("."):
            found = getattr(found, attribute, None)
    if not isinstance(found, keras.layers.Layer):
        raise ExportError(
            f"serve names models that are attributes of the model in training. Received: {name!r}, which is "
            f"{type(found).__name__} in {type(model).__name__} {model.name!r}. It has {_candidates(model)}."
        )
    return found


def _candidates(model: Any) -> list[str]:
    """Returns the attributes of a model that are models; if there are none, those that are layers."""
    for kind in (keras.Model, keras.layers.Layer):
        found = [name for name, each in vars(model).items() if isinstance(each, kind) and not name.startswith("_")]
        if found:
            return found
    return []


def _refuse_without_call(model: Any) -> None:
    if type(model).call is keras.Model.call:
        raise ExportError(
            f"Checkpoint writes a servable graph of the model, as `keras-ddl export` needs it. Received: "
            f"{type(model).__name__} {model.name!r}, which has no call(). Pass serve={_candidates(model)}, or some of "
            f"them, to serve parts of it, or export_base=False to go without."
        )
