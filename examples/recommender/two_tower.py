"""A retrieval model of two towers, users and items (Yi et al., 10.1145/3298689.3346996). The tables are sharded.

    pip install '.[recommender]'   # KerasRS
    keras-ddl run -np 2 python examples/recommender/two_tower.py

The loss compares each user of a batch with all items of the batch, so it is written for the whole batch, on all ranks.
To answer, the model multiplies users with all items (BruteForceRetrieval), so the items' table is gathered.
The watch histories are made up.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import keras_rs
import numpy as np
import tensorflow as tf
from keras import layers, ops

import keras_ddl

USERS, ITEMS, KINDS, WIDTH = 5_000, 6_000, 10, 16


def watched(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns names of users, and items that they have watched, mostly of one kind."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(USERS, size=rows), rng.integers(ITEMS // KINDS, size=rows) * KINDS
    kinds = np.where(rng.random(rows) < 0.9, users % KINDS, rng.integers(KINDS, size=rows))
    return np.array([f"user {each}" for each in users]), (items + kinds).astype("int32")


class TwoTower(keras.Model):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.numbers = layers.StringLookup(vocabulary=names)
        self.users = layers.Embedding(len(names) + 1, WIDTH, name="users")
        self.items = layers.Embedding(ITEMS, WIDTH, name="items")
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)

    def build(self, shape: Any) -> None:
        self.users.build(shape)
        self.items.build(shape)
        self.retrieval.candidate_embeddings = self.items.embeddings
        self.retrieval.build((None, WIDTH))
        self.built = True

    def call(self, names: tf.Tensor, training: bool = False) -> Any:
        users = self.users(self.numbers(names))
        return users if training else self.retrieval(users)

    def train_step(self, batch: Any) -> dict[str, Any]:
        names, items = batch
        with tf.GradientTape() as tape:
            scores = ops.matmul(self(names, training=True), ops.transpose(self.items(items)))
            own = ops.arange(ops.shape(scores)[0])
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=60_000)
parser.add_argument("--epochs", type=int, default=5)
arguments = parser.parse_args()

keras.utils.set_random_seed(1)
strategy = keras_ddl.Strategy(sharding="weights")
names, items = watched(arguments.rows)
with strategy.scope():
    model = TwoTower([f"user {each}" for each in range(USERS)])
    model.build((None,))
    model.compile(keras.optimizers.Adam(0.02))
rows = tf.data.Dataset.from_tensor_slices((names, items)).batch(256, drop_remainder=True)
history = model.fit(rows, epochs=arguments.epochs, verbose=0)
outputs = model.predict(tf.data.Dataset.from_tensor_slices(names[:200]).batch(50), verbose=0)
if strategy.rank == 0:
    print(strategy.explain(model))
    right = np.mean(outputs % KINDS == [[int(each.split()[1]) % KINDS] for each in names[:200]])
    print(f"{right:.2f} of the items found are of the user's kind, on {strategy.size} rank(s)")
