"""Trains on the batches of examples/translation: alone by Keras as it is, and on ranks.

    translation_program.py FOLDER SOURCE TARGET NAME

writes FOLDER/NAME.npz: the weights and the losses of the epochs. Run by test_translation_batches.py.
"""

import contextlib
import sys
from pathlib import Path

import keras
import numpy as np

import keras_ddl
from translation.batches import Batches
from translation.subwords import PADDING, Subwords

folder, *paths, name = (Path(word) for word in sys.argv[1:])
keras.utils.set_random_seed(1)
keras.config.set_floatx("float64")
strategy = keras_ddl.Strategy() if name.name == "ranks" else None
subwords = Subwords.load(folder / "subwords")
batches = Batches(paths, subwords, tokens=900, buckets=5, seed=3)
assert len(batches._held.numbers) < 1500 / batches.ranks.size * 1.2
with strategy.scope() if strategy is not None else contextlib.nullcontext():
    source, target = keras.Input([None], name="source"), keras.Input([None], name="target")
    embed = keras.layers.Embedding(len(subwords), 8)
    read = keras.layers.LSTM(8)(embed(source))
    hidden = keras.layers.Dropout(0.2)(keras.layers.LSTM(8, return_sequences=True)(embed(target), [read, read]))
    model = keras.Model({"source": source, "target": target}, keras.layers.Dense(len(subwords))(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=PADDING)
    model.compile(keras.optimizers.Adam(0.01), loss)
history = model.fit(batches, epochs=2, shuffle=False, verbose=0).history
assert batches.epoch == 2
if batches.ranks.rank == 0:
    weights = {variable.path.replace("/", "."): variable.numpy() for variable in model.trainable_variables}
    np.savez(folder / f"{name}.npz", loss=history["loss"], **weights)
