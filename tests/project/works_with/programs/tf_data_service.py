"""Trains from a tf.data service: tf_data_service.py ADDRESS [JOB_NAME], of a dispatcher with one worker."""

import sys

import keras
import numpy as np
import tensorflow as tf

import keras_ddl

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(50, 8))
y = x.sum(axis=1, keepdims=True)

rows = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda x, y: (x * 2.0, y)).batch(16)
rows = rows.apply(
    tf.data.experimental.service.distribute(
        processing_mode="parallel_epochs",
        service=f"grpc://{sys.argv[1]}",
        job_name=sys.argv[2] if len(sys.argv) > 2 else None,
    )
)

strategy = keras_ddl.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
history = model.fit(rows, epochs=3, verbose=2)
