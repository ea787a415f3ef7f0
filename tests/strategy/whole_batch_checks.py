"""Programs that see the batch as a whole: queues, noise, attention, losses over rows.

Each is written as for one process and was silently wrong where ranks guessed from their own rows. Run by
test_strategy.py; see oracle.py.
"""

from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import RNG, keras
from strategy.oracle import case, fit

layers, ops = keras.layers, keras.ops
SGD = keras.optimizers.SGD
SEQUENCES = RNG.normal(size=(43, 5, 3))
TOKENS = RNG.integers(0, 9, size=(43, 5)).astype("int32")


def with_layer(scope, layer):
    """A model with `layer()` between two Dense ones."""
    with scope:
        inputs = keras.Input((6,))
        hidden = layer()(layers.Dense(5, activation="tanh")(inputs))
        model = keras.Model(inputs, layers.Dense(2)(hidden))
        model.compile(SGD(0.05), "mse")
    return fit(model)


@case()
def check_random_numbers_of_tensorflow_in_a_layer(scope):
    class Noisy(layers.Layer):
        def call(self, x, training=False):
            if not training:
                return x
            noise = tf.random.normal(tf.shape(x), stddev=0.1, dtype="float64")
            other = tf.random.uniform((2, tf.shape(x)[0], 1), dtype="float64")
            return x * (1 + noise) + 0.1 * other[0] * other[1] + 0.01 * tf.random.normal((), dtype="float64")

    return with_layer(scope, Noisy)


@long
@case(tolerance=1e-6)  # Keras computes it in float32
def check_ctc_in_an_endpoint_layer(scope):
    class Endpoint(layers.Layer):
        def call(self, inputs):
            labels, logits = inputs
            rows = ops.shape(labels)[0]
            target_lengths = ops.sum(ops.cast(labels > 0, "int32"), axis=1)
            output_lengths = ops.full((rows,), 5, dtype="int32")
            self.add_loss(ops.mean(ops.ctc_loss(labels, logits, target_lengths, output_lengths, mask_index=0)))
            return logits

    with scope:
        sequence, labels = keras.Input((5, 3), name="s"), keras.Input((2,), dtype="int32", name="labels")
        logits = layers.Dense(4)(layers.GRU(4, return_sequences=True)(sequence))
        model = keras.Model({"s": sequence, "labels": labels}, Endpoint()([labels, logits]))
        model.compile(SGD(0.05))
    labels = 1 + (TOKENS[:, :2] % 3)
    return fit(model, {"s": SEQUENCES, "labels": labels.astype("int32")}, None, batch_size=10)
