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


def _setting(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Settings:
    """See PRESETS; of the sizes, a model reads its own. Each is a flag of the training."""

    model: str = _setting("transformer", "transformer or lstm")
    width: int = _setting(128, "of the Transformer")
    heads: int = _setting(4, "of each of its attentions")
    inner: int = _setting(512, "width inside its feed-forward sublayers")
    normalize: str = _setting("before", "its sublayers, or after them as the original")
    units: int = _setting(256, "of the LSTM")
    layers: int = _setting(2, "of the encoder, and of the decoder")
    dropout: float = _setting(0.1, "share of what is dropped")
    vocabulary: int = _setting(500, "subwords of both languages")
    tokens: int = _setting(4096, "of a batch of all ranks, source and target, with padding")
    buckets: int = _setting(8, "at most so many shapes of batches")
    longest: int = _setting(128, "subwords of a sentence; longer ones are left out")
    epochs: int = _setting(4, "of the whole training")
    learning_rate: float = _setting(2e-3, "of Adam, the highest")
    decay: str = _setting("inverse_square_root", "of the rate: that, luong10 or constant")
    warmup: int = _setting(200, "steps until the rate is highest")
    clip: float = _setting(0.0, "the norm of all gradients together; 0: as it comes")
    smoothing: float = _setting(0.1, "of labels")
    average: int = _setting(5, "checkpoints, the last ones, whose mean is the result")
    save_every: int = _setting(100, "steps, after which there is a checkpoint")
    seed: int = _setting(1, "of weights, dropout and orders")

    def __post_init__(self) -> None:
        """Raises: ValueError: a setting that no training can have."""
        least = dict.fromkeys(("epochs", "average", "save_every", "layers", "buckets", "longest"), 1)
        for name, value in (least | {"warmup": int(self.decay == "inverse_square_root")}).items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be {value} or more. Received: {name}={getattr(self, name)}.")

    def check_sizes_of(self, earlier: Settings | None) -> None:
        """Raises: ValueError: a model of these settings cannot go on from one of `earlier`."""
        own = ("width", "heads", "inner", "normalize") if self.model == "transformer" else ("units",)
        for name in ("model", *own, "layers", "vocabulary", "longest"):
            if earlier is not None and getattr(self, name) != getattr(earlier, name):
                raise ValueError(
                    f"A training goes on with the sizes it began with. Received: {name}={getattr(self, name)}, where "
                    f"it had {getattr(earlier, name)}. Leave --{name} out, or train anew, without --resume."
                )

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
            return schedules.InverseSquareRootDecay(rate, warmup)
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
    parser.add_argument("--preset", choices=PRESETS, help="where settings begin (transformer, or those gone on with)")
    group = parser.add_argument_group("settings, in place of the preset's; in brackets: those of the Transformer")
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
    """Returns the preset's settings, or `earlier` ones where no preset is given, with those that flags have changed."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    begin = earlier if earlier is not None and options.preset is None else PRESETS[options.preset or "transformer"]
    return dataclasses.replace(begin, **{name: value for name, value in given.items() if value is not None})
