"""Trains a ranking model of KerasRS: two large tables, crossed features, dots of embeddings, a pairwise loss."""

import keras
import keras_rs
import numpy as np

import keras_ddl

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
USERS, ITEMS, ROWS, SHOWN = 50_000, 20_000, 90, 4
users, items = rng.integers(USERS, size=(ROWS, 1)), rng.integers(ITEMS, size=(ROWS, SHOWN))
ratings = rng.integers(1, 6, size=(ROWS, SHOWN)).astype("float32")


class Ranking(keras.Model):
    def __init__(self):
        super().__init__()
        self.users, self.items = keras.layers.Embedding(USERS, 16), keras.layers.Embedding(ITEMS, 16)
        self.cross = keras_rs.layers.FeatureCross(projection_dim=8)
        self.dots = keras_rs.layers.DotInteraction()
        self.tower = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])

    def call(self, inputs):
        items = self.items(inputs["items"])
        users = keras.ops.repeat(self.users(inputs["user"]), SHOWN, axis=1)
        crossed = self.cross(keras.ops.concatenate([users, items], axis=-1))
        shape = (-1, keras.ops.shape(items)[-1])
        dots = self.dots([keras.ops.reshape(users, shape), keras.ops.reshape(items, shape)])
        dots = keras.ops.reshape(dots, (-1, SHOWN, 1))
        return keras.ops.squeeze(self.tower(keras.ops.concatenate([crossed, dots], axis=-1)), axis=-1)


strategy = keras_ddl.Strategy()
with strategy.scope():
    model = Ranking()
    model.compile(
        optimizer=keras.optimizers.Adagrad(0.1),
        loss=keras_rs.losses.PairwiseHingeLoss(),
        metrics=[keras_rs.metrics.NDCG(k=3, name="ndcg"), keras_rs.metrics.MeanReciprocalRank(name="mrr")],
    )
history = model.fit({"user": users, "items": items}, ratings, batch_size=16, epochs=2, verbose=2)
