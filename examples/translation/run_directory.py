"""The directory of a training, and the model in it.

    OUTPUT/settings.json        the training's settings
    OUTPUT/subwords.model       the subwords, in sentencepiece's own format
    OUTPUT/ckpt/                checkpoints of callbacks.Checkpoint, from which training can resume
    OUTPUT/averaged/            the result to export: one checkpoint, the mean of the last ones
    OUTPUT/saved_model/1/       the output of `keras-ddl export`
    OUTPUT/history.csv, .png    loss, BLEU, exact match and speed of each epoch

`keras-ddl export` also takes `ckpt`, even during training.
"""

from __future__ import annotations

from pathlib import Path

import keras

import keras_ddl
from keras_ddl import checkpoint, model_state
from translation import DEFAULT_OUTPUT
from translation.settings import FILE, Settings
from translation.subwords import Subwords

DEFAULT = Path(DEFAULT_OUTPUT)


class RunDirectory:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.subwords = self.path / "subwords.model"
        self.checkpoints = self.path / "ckpt"
        self.averaged = self.path / "averaged"
        self.saved_model = self.path / "saved_model"
        self.history = self.path / "history.csv"
        self.picture = self.path / "history.png"

    def begin(self, settings: Settings, subwords: Subwords, resume: bool) -> None:
        """Writes settings and subwords for later commands. Without `resume`, moves an earlier result aside."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not resume and self.averaged.exists():
            checkpoint.set_aside(self.averaged)
        settings.save(self.path)
        subwords.save(self.subwords)

    def earlier_settings(self) -> Settings | None:
        """Returns the settings of the training in this directory, or None."""
        return Settings.load(self.path) if (self.path / FILE).exists() else None

    def load_on_all_ranks(self) -> tuple[keras.Model, Subwords, Settings]:
        """Returns the result of `load` on every rank; only rank 0 reads files. COLLECTIVE."""
        model, subwords, settings = self.load() if keras_ddl.rank() == 0 else (None, None, None)
        subwords, settings = keras_ddl.broadcast_object((subwords, settings))
        model = build(settings, subwords) if model is None else model
        keras_ddl.broadcast_variables(model.variables)
        return model, subwords, settings

    def load(self) -> tuple[keras.Model, Subwords, Settings]:
        """Returns the trained model, its subwords and its settings.

        Raises: FileNotFoundError: there is no training in this directory.
        """
        if not self.subwords.exists():
            raise FileNotFoundError(
                f"A training's directory must have settings.json and subwords.model. Received: {self.path} without "
                "them. Train first: keras-ddl run -np 2 python -m translation.training CORPUS --output DIRECTORY"
            )
        settings, subwords = Settings.load(self.path), Subwords.load(self.subwords)
        model = build(settings, subwords)
        is_done = self.averaged.exists() and checkpoint.list_checkpoints(self.averaged)
        trained = self.averaged if is_done else self.checkpoints
        model_state.restore_checkpoint(model, trained, optimizer=False)
        return model, subwords, settings


def build(settings: Settings, subwords: Subwords) -> keras.Model:
    """Returns a new model with its variables."""
    model = settings.make_model(len(subwords))
    ids = keras.ops.ones((1, 2), "int32")
    model({"source": ids, "target": ids})
    return model
