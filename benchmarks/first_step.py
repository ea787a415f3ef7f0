"""How long the first step of fit takes, what the others take, and what memory a rank needs.

    keras-ddl run -np 2 python benchmarks/first_step.py --network resnet --batch-statistics rank

The first step holds tracing, cutting and what TensorFlow makes of the graph. One network in one process, so that
nothing is traced before; two versions of keras_ddl are compared by starting this with one and the other in turn.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_ddl
from keras_ddl.cli.bench_training.networks import NETWORKS, Network
from keras_ddl.cli.bench_training.step_times import StepTimes

layers = keras.layers
STEPS, FITS = 12, 3


def transformer() -> keras.Model:
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(8000, 128)(inputs)
    for _ in range(4):
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.MultiHeadAttention(4, 32)(x, x)))
        x = layers.LayerNormalization()(x + layers.Dense(128)(layers.Dense(512, activation="relu")(x)))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


_MORE = {"transformer": Network(transformer, 16, (64,), tokens=8000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=[*NETWORKS, *_MORE], default="resnet", help="default: %(default)s")
    parser.add_argument("--batch-statistics", help="as for keras_ddl.Strategy (default: what that takes)")
    options = parser.parse_args()

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    chosen = {"batch_statistics": options.batch_statistics} if options.batch_statistics else {}
    strategy = keras_ddl.Strategy(**chosen)
    network = {**NETWORKS, **_MORE}[options.network]
    with strategy.scope():
        model = network.make()
        model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    x, y = network.rows(network.batch * strategy.size)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x)).cache().repeat()
    watch = StepTimes()

    def fit(steps: int) -> list[float]:
        model.fit(data, steps_per_epoch=steps, epochs=1, shuffle=False, verbose=0, callbacks=[watch])
        return watch.seconds

    first = fit(1)[0]
    step = np.median([statistics.median(fit(STEPS)) for _ in range(FITS)])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    if strategy.rank == 0:
        print(
            f"{options.network:>12} {1e3 * step:8.1f} ms a step, first {first:6.2f} s, {memory:.2f} GB a rank at most"
        )


if __name__ == "__main__":
    main()
