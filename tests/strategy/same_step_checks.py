"""A step runs only if all ranks read equal values besides its arguments. Run by test_strategy.py."""

import contextlib
import re

import numpy as np

from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, RankMismatchError
from strategy.common import FEW, RANK, SIZE, STRATEGY, everyone, keras, own_folder, raises, set_precision

set_precision("float32")
layers = keras.layers
WORDS = ["cat", "dog", "cow", "hen"]
UNLIKE = np.random.default_rng(RANK)  # different numbers on each rank
ALIKE = np.random.default_rng(99)


@keras.saving.register_keras_serializable("same_step_checks")
class Features(layers.Layer):
    """Multiplies by the tensor that `make` returns when the layer is built."""

    def __init__(self, make, use=keras.ops.matmul, **options):
        super().__init__(**options)
        self.make, self.use = make, use

    def build(self, shape):
        self.w = self.make()

    def call(self, x):
        return self.use(x, self.w)


def model_with(*first, inputs=None, **compiled):
    set_precision("float32")
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((6,)) if inputs is None else inputs, *first, layers.Dense(2)])
        model.compile("sgd", "mse", **compiled)
    return model


def assert_mismatch(call, *words):
    """Checks that `call` raises one RankMismatchError, with `words`, on all ranks, and that collectives still work."""
    try:
        call()
    except RankMismatchError as error:
        text = str(error)
    else:
        text = "no error"
    assert everyone(re.sub(r"\(rank \d+\)", "", text)) == [re.sub(r"\(rank \d+\)", "", text)] * SIZE
    for each in words:
        assert re.search(each, text, re.DOTALL), (each, text)


def drawn(rng, *shape):
    return keras.ops.convert_to_tensor(rng.normal(size=shape).astype("float32"))


def fit(model, x=FEW[0], y=FEW[1]):
    return lambda: model.fit(x, y, batch_size=10, verbose=0)


@long
def check_same_step_names_the_layer_whose_tensor_differs():
    for shape in ((6, 2), (6, 40)):  # TensorFlow turns small tensors into constants
        model = model_with(Features(lambda shape=shape: drawn(UNLIKE, *shape), name="features"))
        before = model.get_weights()
        what = rf"layer 'features', attribute w \(float32\[6, {shape[1]}\], read in .*same_step_checks.py:\d+"
        assert_mismatch(fit(model), "train_step: ", what, "on rank 0, and .* on rank 1", "add_weight")
        assert_mismatch(lambda: model.evaluate(*FEW, verbose=0), "test_step: ")  # noqa: B023
        assert_mismatch(lambda: model.predict(FEW[0], verbose=0), "predict_step: ")  # noqa: B023
        np.testing.assert_array_equal(model.get_weights()[0], before[0])
    model = model_with(Features(lambda: drawn(ALIKE, 6, 40)))
    fit(model)()


@long
def check_same_step_compares_numbers_of_layers():
    assert_mismatch(
        fit(model_with(Features(UNLIKE.normal, keras.ops.multiply))), "constant float32.*on rank 0, and .* on rank 1"
    )
    assert_mismatch(
        fit(model_with(Features(lambda: UNLIKE.normal(size=(6, 40)).astype("float32")))), "constant float32.6,40."
    )
    assert_mismatch(fit(model_with(layers.LeakyReLU(0.1 + 0.1 * RANK))), "on rank 0, and .* on rank 1")
    model = model_with(layers.Dropout(0.1 + 0.1 * RANK))
    assert_mismatch(fit(model), "constant")
    model.predict(FEW[0], verbose=0)  # uses none


def words_model(vocabulary):
    stack = [layers.StringLookup(vocabulary=vocabulary, name="words"), layers.Embedding(8, 3), layers.Flatten()]
    return model_with(*stack, inputs=keras.Input((2,), dtype="string"))


@long
def check_same_step_compares_lookup_tables():
    words = tf.constant([["cat", "dog"], ["cow", "cat"], ["hen", "hen"], ["ox", "dog"]])
    answers = np.ones((4, 2), "float32")
    other = WORDS[::-1] if RANK == 1 else WORDS
    words_model(WORDS).fit(words, answers, batch_size=2, verbose=0)
    assert_mismatch(
        lambda: words_model(other).fit(words, answers, batch_size=2, verbose=0),
        r"layer 'words', attribute lookup_table",
        r"4 entries \{b'cat': 1, b'dog': 2, b'cow': 3, b'hen': 4\} on rank 0, and 4 entries \{b'hen': 1",
        "sorted",
    )
    adapted = layers.TextVectorization(output_mode="multi_hot", name="text")
    adapted.adapt(tf.constant(["one two", "two three", ["four", "five"][RANK > 0]]))
    model = model_with(adapted, inputs=keras.Input((), dtype="string"))
    assert_mismatch(
        lambda: model.evaluate(tf.constant(["one", "two"]), answers[:2], verbose=0),
        "layer 'string_lookup.*b'four'.*on rank 0, and 4 entries .*b'five'",
    )


def steps_with_per_rank_values():
    """Yields (text in the error, step) for steps that read different values on each rank."""
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, -1.0)
    table.insert(tf.constant(WORDS), tf.constant(UNLIKE.normal(size=4), tf.float32))
    yield "table", lambda x: tf.cond(tf.size(x) > 0, lambda: x + table.lookup(tf.constant("dog")), lambda: x)
    numbers = tf.constant(UNLIKE.integers(0, 9, size=200))

    def loops(x):
        return tf.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, y + tf.cast(numbers[n], y.dtype)), (0, x))[1]

    yield "numbers", loops
    yield "", lambda x: (x, tf.strings.regex_replace(tf.strings.as_string(x), "ab"[RANK > 0], ""))
    yield "", lambda x: (x, UNLIKE.normal())
    name = tf.Variable("ab"[RANK > 0])
    yield "name", lambda x: (x, tf.strings.length(name))
    ragged = tf.ragged.constant([[1.0] * 200, [2.0 + RANK]])
    yield "", lambda x: x + tf.reduce_sum(ragged)
    empty = tf.zeros([0, 3 + RANK])
    yield "", lambda x: x + tf.cast(tf.shape(tf.concat([empty, empty], 0))[1], x.dtype)


@long
def check_same_step_compares_values_in_functions():
    for name, step in steps_with_per_rank_values():
        called = STRATEGY.function(step)
        assert_mismatch(lambda: called(tf.ones([4, 2])), "<lambda>: |loops: ", "on rank 0, and ", name)  # noqa: B023


@long
def check_same_step_ignores_what_only_one_rank_uses():
    with own_folder() as folder, contextlib.redirect_stdout(None):
        own = tf.constant(f"{folder}/file")
        writer = tf.summary.create_file_writer(str(folder))
        queue = tf.queue.FIFOQueue(9, [tf.float32], [[]])
        queue.enqueue_many(tf.range(9.0) + 100.0 * RANK)
        numbers = iter(tf.data.Dataset.range(9).map(lambda n: n + 100 * RANK))

        @STRATEGY.function
        def step(x):
            tf.print("on rank", RANK, own)
            tf.io.write_file(tf.strings.join([own, "_step"]), tf.strings.as_string(tf.reduce_sum(x)))
            tf.debugging.assert_greater(tf.reduce_sum(x), 0.0, message=f"rank {RANK}")
            with writer.as_default(step=0):
                tf.summary.scalar(f"rank {RANK}", tf.reduce_sum(x))
            drawn = tf.numpy_function(lambda: np.float32(RANK + 1), [], tf.float32)
            drawn.set_shape([])
            return drawn, next(numbers), queue.dequeue()

        for number in range(3):
            found = [each.numpy().item() for each in step(tf.ones([4, 2]))]
            assert found == [1, number, number], found  # rank 0's values


def check_same_step_rejects_values_it_cannot_compare():
    dataset = tf.data.Dataset.range(3)
    step = STRATEGY.function(lambda x: x + tf.cast(dataset.reduce(np.int64(0), lambda a, b: a + b), x.dtype))
    raises(ConfigError, "Received: a dataset", lambda: step(tf.ones(4)))
    assert everyone(RANK) == list(range(SIZE))


def check_same_step_compares_again_after_retracing():
    values = [drawn(ALIKE, 6, 40)]

    @STRATEGY.function
    def step(x):
        return x @ values[-1]

    step(tf.ones([4, 6]))
    values.append(drawn(UNLIKE, 6, 40))
    step(tf.ones([4, 6]))  # reuses the trace
    assert_mismatch(lambda: step(tf.ones([5, 6])), "float32.6, 40.")
    values.append(drawn(ALIKE, 6, 40))
    step(tf.ones([5, 6]))


@long
def check_same_step_compares_writes_of_eager_steps():
    model = model_with(Features(lambda: drawn(UNLIKE, 6, 40), name="features"), run_eagerly=True)
    before = model.get_weights()
    assert_mismatch(fit(model), "runs eagerly.*dense/kernel on rank 1 differs|runs eagerly.*returns on rank 1 differs")
    for mine, earlier in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, earlier)  # undone
    assert_mismatch(lambda: model.predict(FEW[0], verbose=0), "predict_step.*returns on rank 1")
    fit(model_with(Features(lambda: drawn(ALIKE, 6, 40)), run_eagerly=True))()


@long
def check_same_step_compares_the_order_of_weights():
    class Unordered(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Dense(6) for _ in range(2)]

        def call(self, x):
            for each in self.parts[:: 1 if RANK == 0 else -1]:
                x = each(x)
            return x[:, :2]

    with STRATEGY.scope():
        model = Unordered()
        for each in model.parts:
            each.build((None, 6))
        model.compile("sgd", "mse")
    assert_mismatch(
        lambda: model.predict(FEW[0], verbose=0), "variable 0 of the model.*on rank 0, and .*variable 2 of the model"
    )
