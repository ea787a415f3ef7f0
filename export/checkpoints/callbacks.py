"""Callbacks that go with a Checkpoint: ExportBase changes the base graph, Publish exports during training."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_ddl import export
from keras_ddl.callbacks.checkpoint import Checkpoint
from keras_ddl.errors import ConfigError
from keras_ddl.state.callback_state import JobCallback

Serve = str | Sequence[str] | Mapping[str, Any] | None


class _BesideCheckpoint(JobCallback):
    """A callback that a Checkpoint of the same fit reads."""

    runs_last = True  # for `others`
    async_safe = True

    @property
    def of_this_process(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names the attributes that a joining rank does not take from others: all, because its script sets them."""
        return tuple(vars(self))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        saving = [each for each in self.others if isinstance(each, Checkpoint)]
        name = type(self).__name__
        if (count := sum(type(each) is type(self) for each in self.others)) > 1:
            raise ConfigError(f"fit takes only one {name}. Received: {count} of them. Pass one.")
        if len(saving) != 1 or not saving[0].export_base:
            received = (
                f"{len(saving)} Checkpoint callbacks" if len(saving) != 1 else "a Checkpoint with export_base=False"
            )
            raise ConfigError(
                f"{name} needs exactly one callbacks.Checkpoint in fit, and it must write the base graph. Received: "
                f"{received}. Pass callbacks=[Checkpoint(folder), {name}(...)]."
            )


class ExportBase(_BesideCheckpoint):
    """Changes the base graph that the Checkpoint of the same fit writes for `keras-ddl export`.

        callbacks=[Checkpoint("ckpt"), ExportBase(sample=x[:4])]

    Without it, a Checkpoint writes the graph of the whole model, which takes the same inputs as in training.

    Args:
        sample: a few rows of real input, on which every export compares outputs; default: made-up rows.
        serve: parts to export instead of the model, if the training step does not call the model itself: an attribute
            (`serve="generator"`), several (`["generator", "discriminator"]`) or name -> attribute or layer
            (`{"encoder": "student.encoder"}`). `keras-ddl export --model NAME` then selects one.
        input_signature, classify, regress, signatures: as in `keras_ddl.export.write_base_graph`. If serve is a list or
            a mapping, then sample and these four are mappings, too: name of a part -> the value for that part.
    Raises:
        ConfigError: bad arguments (when created); fit has no Checkpoint that writes a base graph, or several
            Checkpoints (at train begin).
    """

    def __init__(
        self,
        *,
        sample: Any = None,
        serve: Serve = None,
        input_signature: Mapping[str, Any] | None = None,
        classify: Any = None,
        regress: Any = None,
        signatures: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.parts = _parts(serve)
        self.is_single = serve is None or isinstance(serve, str)
        given = {
            "sample": sample,
            "input_signature": input_signature,
            "classify": classify,
            "regress": regress,
            "signatures": signatures,
        }
        self.options = {name: self._options_of(name, given) for name in self.parts}

    def _options_of(self, name: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
        if self.is_single:
            return dict(given)
        for option, value in given.items():
            if value is not None and not (isinstance(value, Mapping) and set(value) <= set(self.parts)):
                raise ConfigError(
                    f"With several parts in serve, {option} must map the name of each part to its value. The names are "
                    f"{list(self.parts)}. Received: "
                    f"{list(value) if isinstance(value, Mapping) else type(value).__name__}."
                )
        return {option: None if value is None else value.get(name) for option, value in given.items()}


class Publish(_BesideCheckpoint):
    """Exports checkpoints during training, for a server that follows the directory.

        callbacks=[Checkpoint("ckpt"), Publish("served")]

    A process of lower priority on rank 0's host exports the checkpoints that the Checkpoint of the same fit writes. The
    version number is the checkpoint's step. If several checkpoints are written during one export, only the newest of
    them is exported. A failed export is a warning; training continues.

    Args:
        dir: the directory of the versions; if ExportBase serves several parts, each part has a subdirectory.
        keep: how many versions to keep.
    Raises:
        ConfigError: bad arguments (when created); fit has no Checkpoint that writes a base graph, or several
            Checkpoints (at train begin). ExportError, on every rank: the directory cannot be written (at train begin).
    """

    dir: Path
    keep: int

    def __init__(self, dir: str | Path, *, keep: int = 3) -> None:
        super().__init__()
        if not isinstance(keep, numbers.Integral) or isinstance(keep, bool) or keep < 1:
            raise ConfigError(
                f"Publish: keep must be the number of versions to keep, 1 or more. Received: keep={keep!r}."
            )
        self.dir, self.keep = Path(dir), int(keep)


def _parts(serve: Serve) -> dict[str | None, Any]:
    """Returns name -> attribute of the model, or the part itself."""
    if serve is None:
        return {None: None}
    named = {serve: serve} if isinstance(serve, str) else serve
    if not isinstance(named, Mapping):
        named = {name: name for name in named} if isinstance(named, (list, tuple)) else {}
    valid: dict[str | None, Any] = {name: part for name, part in named.items() if export.is_name(name)}
    kinds = (str, keras.layers.Layer)
    if not valid or len(valid) < len(named) or not all(isinstance(part, kinds) for part in valid.values()):
        raise ConfigError(
            "serve must be an attribute of the model, a list of attributes, or a mapping from names to attributes or "
            f"layers, with names of letters, digits, '_' and '-'. Received: serve={serve!r}. For a part of a part, use "
            "serve={'encoder': 'student.encoder'}, for example."
        )
    return valid
