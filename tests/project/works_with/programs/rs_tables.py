"""Trains KerasRS's DistributedEmbedding: two features that share a table, and one with its own table."""

import keras
import keras_rs
import numpy as np

import keras_ddl

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
ROWS = 90
inputs = {
    "liked": rng.integers(20_000, size=(ROWS, 5)).astype("int32"),
    "shown": rng.integers(20_000, size=(ROWS, 1)).astype("int32"),
    "user": rng.integers(50_000, size=(ROWS, 1)).astype("int32"),
}
clicks = rng.integers(2, size=(ROWS, 1)).astype("float32")


def feature(name, table, ids):
    return keras_rs.layers.FeatureConfig(
        name=name, table=table, input_shape=(None, ids), output_shape=(None, table.embedding_dim)
    )


def table(name, rows):
    # The default initializer drew its seed when keras_rs was imported, before set_random_seed.
    return keras_rs.layers.TableConfig(
        name=name, vocabulary_size=rows, embedding_dim=16, combiner="mean", initializer="uniform"
    )


strategy = keras_ddl.Strategy()
with strategy.scope():
    items, users = table("items", 20_000), table("users", 50_000)
    embedding = keras_rs.layers.DistributedEmbedding(
        {"liked": feature("liked", items, 5), "shown": feature("shown", items, 1), "user": feature("user", users, 1)}
    )
    ids = {name: keras.Input(each.shape[1:], dtype="int32", name=name) for name, each in inputs.items()}
    rows = embedding(ids)
    hidden = keras.layers.Dense(16, activation="relu")(
        keras.layers.Concatenate()([rows[name] for name in sorted(rows)])
    )
    model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(optimizer="adagrad", loss="binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
history = model.fit(inputs, clicks, batch_size=16, epochs=2, verbose=2)
