"""The settings of a training: sizes, data, optimizer. Presets give all settings, and flags change some of them."""

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


def _setting(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings. A model only uses its own sizes. The training has a flag for each setting."""

    model: str = _setting("transformer", "transformer or lstm")
    width: int = _setting(128, "width of the Transformer")
    heads: int = _setting(4, "heads of each attention")
    inner: int = _setting(512, "width inside the feed-forward sublayers")
    normalize: str = _setting("before", "normalize before sublayers, or after them as in the original")
    units: int = _setting(256, "units of the LSTM")
    layers: int = _setting(2, "layers of the encoder, and of the decoder")
    dropout: float = _setting(0.1, "dropout rate")
    vocabulary: int = _setting(500, "number of subwords of both languages")
    tokens: int = _setting(4096, "tokens in a batch of all ranks: source and target, with padding")
    buckets: int = _setting(8, "largest number of batch shapes")
    longest: int = _setting(128, "leave out sentences with more subwords than this")
    epochs: int = _setting(4, "epochs of the whole training")
    learning_rate: float = _setting(2e-3, "Adam's highest learning rate")
    decay: str = _setting("inverse_square_root", "schedule of the rate: inverse_square_root, luong10 or constant")
    warmup: int = _setting(200, "steps until the rate is highest")
    clip: float = _setting(0.0, "clip the norm of all gradients together to this; 0: do not clip")
    smoothing: float = _setting(0.1, "label smoothing")
    average: int = _setting(5, "the result is the mean of this many last checkpoints")
    save_every: int = _setting(100, "steps between checkpoints")
    seed: int = _setting(1, "seed of weights, dropout and the order of data")

    def __post_init__(self) -> None:
        """Raises: ValueError: a setting is too small."""
        least = dict.fromkeys(("epochs", "average", "save_every", "layers", "buckets", "longest"), 1)
        for name, value in (least | {"warmup": int(self.decay == "inverse_square_root")}).items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be {value} or more. Received: {name}={getattr(self, name)}.")

    def check_sizes_of(self, earlier: Settings | None) -> None:
        """Raises: ValueError: a model with these settings cannot continue from a model with `earlier` settings."""
        own = ("width", "heads", "inner", "normalize") if self.model == "transformer" else ("units",)
        for name in ("model", *own, "layers", "vocabulary", "longest"):
            if earlier is not None and getattr(self, name) != getattr(earlier, name):
                raise ValueError(
                    f"A resumed training must keep its sizes. Received: {name}={getattr(self, name)}, but the training "
                    f"began with {getattr(earlier, name)}. Leave out --{name}, or train anew without --resume."
                )

    def make_model(self, vocabulary: int) -> keras.Model:
        """Returns a new model. vocabulary: the number of ids of the trained subwords."""
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
        """Returns the learning rate for a training of `steps` steps: a Keras schedule, or a number."""
        rate, warmup = self.learning_rate, self.warmup
        if self.decay == "inverse_square_root":
            return schedules.InverseSquareRootDecay(rate, warmup)
        after = schedules.luong_decay(rate, max(steps - warmup, 20)) if self.decay == "luong10" else None
        return schedules.LinearWarmup(rate, warmup, after=after) if warmup else after or rate

    def make_optimizer(self, rate: Any) -> keras.optimizers.Optimizer:
        """Returns Adam with the settings of the Transformer's authors. rate: a number or a schedule."""
        clip = {"global_clipnorm": self.clip} if self.clip else {}
        return keras.optimizers.Adam(rate, beta_2=0.98, epsilon=1e-9, **clip)

    def save(self, directory: str | Path) -> None:
        """Writes settings.json to the directory."""
        (Path(directory) / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> Settings:
        """Returns the settings that `save` wrote."""
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
    # The model of TensorFlow's NMT tutorial for English and German, which used SGD.
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
    parser.add_argument("--preset", choices=PRESETS, help="default settings (transformer, or the resumed training's)")
    group = parser.add_argument_group("settings that replace the preset's; the Transformer's are in brackets")
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
            help=f"{field.metadata['help']} ({field.default})",
        )


def chosen(options: argparse.Namespace, earlier: Settings | None = None) -> Settings:
    """Returns the preset's settings, or `earlier` settings without a preset, with the changes by flags."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    begin = earlier if earlier is not None and options.preset is None else PRESETS[options.preset or "transformer"]
    return dataclasses.replace(begin, **{name: value for name, value in given.items() if value is not None})
