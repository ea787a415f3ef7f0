"""Trains both models of examples/translation in float64: in one process with plain Keras, or on ranks.

    translation_program.py FOLDER SOURCE TARGET NAME

Writes FOLDER/NAME-MODEL.npz: the weights and the losses. Run by test_translation_training.py.
"""

import contextlib
import sys
from pathlib import Path

import keras
import numpy as np

import keras_ddl
from translation.settings import Settings
from translation.subwords import Subwords
from translation.training import compiled, make_batches

folder, *paths, name = (Path(word) for word in sys.argv[1:])
keras.config.set_floatx("float64")
strategy = keras_ddl.Strategy() if name.name == "ranks" else None
subwords = Subwords.load(folder / "subwords")
small = {"layers": 1, "tokens": 1200, "buckets": 2, "epochs": 2, "warmup": 8, "clip": 1.0, "dropout": 0.2}
for settings in (
    Settings(width=8, heads=2, inner=16, **small),
    Settings(model="lstm", units=8, decay="luong10", smoothing=0.0, **small),
):
    keras.utils.set_random_seed(settings.seed)
    batches = make_batches(paths, subwords, settings)
    assert len(batches._held.numbers) < batches.plan.lengths.shape[0] / batches.ranks.size * 1.3
    steps = settings.epochs * len(batches)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = compiled(settings, subwords, settings.make_schedule(steps))
    before = {variable.path: variable.numpy() for variable in model.trainable_variables}
    history = model.fit(batches, epochs=settings.epochs, shuffle=False, verbose=0).history
    assert batches.epoch == settings.epochs and int(model.optimizer.iterations.numpy()) == steps >= 20
    if batches.ranks.rank == 0:
        weights = {variable.path: variable.numpy() for variable in model.trainable_variables}
        assert all(np.abs(weights[path] - before[path]).max() > 1e-4 for path in weights)
        weights = {path.replace("/", "."): value for path, value in weights.items()}
        np.savez(folder / f"{name}-{settings.model}.npz", loss=history["loss"], **weights)
