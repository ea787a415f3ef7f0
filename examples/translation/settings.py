"""What a training is made of: sizes, data, optimizer. The presets are its beginnings, flags change them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import keras

from keras_ddl import schedules
from translation.lstm import LSTMTranslator
from translation.transformer import Transformer

FILE = "settings.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """See PRESETS; of the sizes, a model reads its own."""

    model: str = "transformer"  # or "lstm"
    # Sizes. Of the Transformer:
    width: int = 128
    heads: int = 4
    inner: int = 512
    normalize: str = "before"
    # of the LSTM:
    units: int = 256
    # of both:
    layers: int = 2
    dropout: float = 0.1
    # Data.
    vocabulary: int = 500
    tokens: int = 4096  # of a batch of all ranks, source and target, with padding
    buckets: int = 8
    longest: int = 128
    # Optimizer: Adam.
    epochs: int = 4
    learning_rate: float = 2e-3  # the highest
    decay: str = "inverse_square_root"  # or "luong10", or "constant"
    warmup: int = 200  # steps
    clip: float = 0.0  # the norm of all gradients together; 0: as it comes
    smoothing: float = 0.1  # of labels
    average: int = 5  # the last checkpoints, whose mean is the result; 1: the last one
    save_every: int = 100  # steps, after which there is a checkpoint
    seed: int = 1

    def make_model(self, vocabulary: int) -> keras.Model:
        """Returns a new model. vocabulary: the number of ids that the subwords came to."""
        if self.model == "lstm":
            return LSTMTranslator(vocabulary, units=self.units, layers=self.layers, dropout=self.dropout)
        return Transformer(
            vocabulary,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            inner=self.inner,
            dropout=self.dropout,
            longest=2 * self.longest,
            normalize=self.normalize,
        )

    def make_schedule(self, steps: int) -> Any:
        """Returns the learning rate over the steps of a whole training of `steps`: a Keras schedule, or a number."""
        rate, warmup = self.learning_rate, self.warmup
        if self.decay == "inverse_square_root":
            return schedules.InverseSquareRootDecay(rate, max(warmup, 1))
        after = schedules.luong_decay(rate, max(steps - warmup, 20)) if self.decay == "luong10" else None
        return schedules.LinearWarmup(rate, warmup, after=after) if warmup else after or rate

    def make_optimizer(self, rate: Any) -> keras.optimizers.Optimizer:
        """Returns Adam as the Transformer's authors set it. rate: a number or a schedule."""
        clip = {"global_clipnorm": self.clip} if self.clip else {}
        return keras.optimizers.Adam(rate, beta_2=0.98, epsilon=1e-9, **clip)

    def save(self, directory: str | Path) -> None:
        """Writes DIRECTORY/settings.json."""
        (Path(directory) / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> Settings:
        """Returns what `save` wrote."""
        return cls(**json.loads((Path(directory) / FILE).read_text()))


PRESETS = {
    "transformer": Settings(),
    # "base" of arXiv 1706.03762, table 3; its batches had 25,000 tokens on each side.
    "transformer-base": Settings(
        width=512,
        heads=8,
        inner=2048,
        layers=6,
        vocabulary=37_000,
        tokens=50_000,
        learning_rate=7e-4,
        warmup=4000,
        save_every=1500,
    ),
    "lstm": Settings(
        model="lstm",
        layers=1,
        dropout=0.2,
        learning_rate=2e-3,
        decay="luong10",
        warmup=0,
        clip=5.0,
        smoothing=0.0,
        average=1,
    ),
    # That of TensorFlow's NMT tutorial for English and German, which trained it with SGD.
    "lstm-large": Settings(
        model="lstm",
        units=1024,
        layers=2,
        dropout=0.2,
        vocabulary=36_000,
        tokens=8192,
        save_every=1000,
        learning_rate=1e-3,
        decay="luong10",
        warmup=0,
        clip=5.0,
        smoothing=0.0,
        average=1,
    ),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --preset and a flag for each setting."""
    parser.add_argument("--preset", choices=PRESETS, default="transformer", help="where settings begin (transformer)")
    group = parser.add_argument_group("settings", "default: the preset's")
    choices = {
        "model": ["transformer", "lstm"],
        "normalize": ["before", "after"],
        "decay": ["inverse_square_root", "luong10", "constant"],
    }
    for field in dataclasses.fields(Settings):
        kind = type(field.default)
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            choices=choices.get(field.name),
            metavar=None if field.name in choices else kind.__name__.upper(),
        )


def chosen(options: argparse.Namespace) -> Settings:
    """Returns the preset's settings with those that flags have changed."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    return dataclasses.replace(PRESETS[options.preset], **{k: v for k, v in given.items() if v is not None})
