"""A model that ranks ads by the chance of a click (DLRM: Naumov et al., arXiv 1906.00091). The tables are sharded.

    pip install '.[recommender]'   # KerasRS
    keras-ddl run -np 2 python examples/recommender/dlrm.py

Each rank has half of each table, and only the rows that a batch needs are sent (docs/tables.md). The clicks are
made up.
"""

from __future__ import annotations

import argparse

import keras
import keras_rs
import numpy as np
import tensorflow as tf
from keras import layers

import keras_ddl

SITES, ADS, SEEN, WIDTH = 30_000, 20_000, 5, 16


def clicks(rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the inputs of some rows, and whether an ad was clicked. Neighboring ads are similarly popular."""
    rng = np.random.default_rng(0)
    liked = rng.normal(size=ADS // 100).repeat(100)
    ads = rng.zipf(1.3, (rows, SEEN + 1)) * 37 % ADS
    sites = rng.zipf(1.3, rows) % SITES
    numbers = rng.normal(size=(rows, 3)).astype("float32")
    chance = liked[ads[:, 0]] + 0.5 * liked[ads[:, 1:]].mean(1) + 0.5 * numbers[:, 0]
    inputs = {
        "site": np.array([[f"site-{each}.example"] for each in sites]),
        "ad": ads[:, :1].astype("int32"),
        "seen": ads[:, 1:].astype("int32"),
        "numbers": numbers,
    }
    return inputs, (chance > 0).astype("float32")[:, np.newaxis]


def table(name: str, rows: int) -> keras_rs.layers.TableConfig:
    # The default initializer draws its seed when keras_rs is imported, before the program can set one.
    return keras_rs.layers.TableConfig(name, rows, WIDTH, initializer="uniform", combiner="mean")


def feature(name: str, of: keras_rs.layers.TableConfig, ids: int) -> keras_rs.layers.FeatureConfig:
    return keras_rs.layers.FeatureConfig(name, of, input_shape=(None, ids), output_shape=(None, WIDTH))


def dlrm() -> keras.Model:
    inputs = {
        "site": keras.Input((1,), dtype="string", name="site"),
        "ad": keras.Input((1,), dtype="int32", name="ad"),
        "seen": keras.Input((SEEN,), dtype="int32", name="seen"),
        "numbers": keras.Input((3,), name="numbers"),
    }
    ads, sites = table("ads", ADS), table("sites", SITES)
    embedding = keras_rs.layers.DistributedEmbedding(
        {"ad": feature("ad", ads, 1), "seen": feature("seen", ads, SEEN), "site": feature("site", sites, 1)}
    )
    ids = {"ad": inputs["ad"], "seen": inputs["seen"]}
    rows = embedding({**ids, "site": layers.Hashing(SITES, output_mode="int")(inputs["site"])})
    bottom = layers.Dense(WIDTH, activation="relu")(layers.Dense(32, activation="relu")(inputs["numbers"]))
    pairs = keras_rs.layers.DotInteraction()([*(rows[name] for name in sorted(rows)), bottom])
    top = layers.Dense(32, activation="relu")(layers.Concatenate()([pairs, bottom]))
    return keras.Model(inputs, layers.Dense(1)(top))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=20_000)
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()

keras.utils.set_random_seed(1)
strategy = keras_ddl.Strategy(sharding="weights")
with strategy.scope():
    model = dlrm()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=[keras.metrics.AUC(from_logits=True, name="auc")])
inputs, clicked = clicks(arguments.rows)
rows = tf.data.Dataset.from_tensor_slices((inputs, clicked))
held_out, trained = rows.take(arguments.rows // 10), rows.skip(arguments.rows // 10)
history = model.fit(trained.batch(128, drop_remainder=True), epochs=arguments.epochs, verbose=0)
outputs = model.evaluate(held_out.batch(128), verbose=0)  # loss, AUC
if strategy.rank == 0:
    print(strategy.explain(model))
    print(f"held-out AUC {outputs[1]:.3f} on {strategy.size} rank(s)")
