"""In fit: functions of the host, generators of random numbers, batches of ever other sizes. Run by test_strategy.py."""

import numpy as np

from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, RNG, STRATEGY, X, Y, keras, shared_folder, small_model
from strategy.oracle import case, fit

layers, ops = keras.layers, keras.ops
TOKENS = RNG.integers(0, 9, size=(9, 7)).astype("int32")


def check_functions_of_the_host_run_once_on_the_whole_batch():
    seen = []

    class Told(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            tf.print("rows", tf.shape(data[0])[0], output_stream=f"file://{folder}/printed")
            total = tf.py_function(lambda x: seen.append(len(x)) or tf.reduce_sum(x), [data[0]], tf.float64)
            return {**logs, "total": total}

    with shared_folder() as folder:
        with STRATEGY.scope():
            model = Told([keras.Input((6,)), layers.Dense(2)])
            model.compile("sgd", "mse")
        history = model.fit(X[:21], Y[:21], batch_size=10, epochs=2, shuffle=False, verbose=0).history
        printed = (folder / "printed").read_text().splitlines() if RANK == 0 else []
    np.testing.assert_allclose(history["total"], [X[20].sum()] * 2)  # of the last batch, on all ranks
    assert seen == ([10, 10, 1] * 2 if RANK == 0 else []), seen
    assert printed == (["rows 10", "rows 10", "rows 1"] * 2 if RANK == 0 else []), printed


@long
@case()
def check_generators_of_layers(scope):
    class Noise(layers.Layer):
        def build(self, shape):
            self.generator = tf.random.Generator.from_seed(5)
            self.state = self.add_weight(shape=(3,), initializer="zeros", dtype="int64", trainable=False)

        def call(self, x, training=False):
            if training:  # as long as the batch, and not
                x = x + self.generator.normal(tf.shape(x), dtype=x.dtype)
                x = x * self.generator.uniform([2], dtype=x.dtype)
                self.state.assign(self.generator.state)
            return x

    with scope:
        model = small_model()
        model.add(Noise())
        model.compile("sgd", "mse")
    return fit(model)


@long
@case()
def check_sizes_that_change_every_step_are_not_traced_anew(scope):
    traced = []

    class Counted(layers.Layer):
        def call(self, x):
            traced.append(x.shape)
            return x

    def batches():  # buckets of tokens: few long texts, or many short ones
        for rows, words in ((5, 3), (9, 7), (4, 5), (1, 2), (8, 6)):
            yield TOKENS[:rows, :words], TOKENS[:rows, :words]

    spec = tf.TensorSpec((None, None), tf.int32)
    with scope:
        hidden = layers.GRU(3, return_sequences=True)
        parts = [layers.Embedding(9, 4, mask_zero=True), hidden, Counted(), layers.Dense(9)]
        model = keras.Sequential([keras.Input((None,), dtype="int32"), *parts])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, weighted_metrics=["accuracy"])
    before = len(traced)
    trained = fit(model, tf.data.Dataset.from_generator(batches, output_signature=(spec, spec)), None)
    assert len(traced) - before <= 2, traced  # for its shapes, and for the step
    return trained
