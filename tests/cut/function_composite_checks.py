"""`Strategy.function` with strings, ragged and sparse tensors, on real ranks. Run by test_function.py."""

import keras
import numpy as np
from cut.against_one_process import assert_same, expected

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, STRATEGY, raises, set_precision

layers = keras.layers
WORDS = ["the", "ranks", "of a", "job", "", "\u00e9t\u00e9"]


def texts(rows, seed):
    """Sentences of several lengths, none among them, as ragged words, as a sparse bag of them, and labels."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, rows)
    ragged = tf.RaggedTensor.from_row_lengths(rng.choice(WORDS, lengths.sum()).tolist(), lengths)
    bag = tf.sparse.from_dense(rng.integers(0, 3, [rows, 5]).astype(float))
    return ragged, bag, rng.normal(size=(rows, 1))


def loop_of_texts(wrap, data):
    """Strings, a table, ragged and sparse arguments, an Embedding looked up with tokens that repeat."""
    set_precision("float64")
    keras.utils.set_random_seed(4)
    lookup = layers.StringLookup(vocabulary=WORDS[:4])
    embedding, head = layers.Embedding(5, 4), layers.Dense(1)
    embedding.build(), head.build((None, 9))
    weights = [*embedding.trainable_variables, *head.trainable_variables]
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(weights)

    @wrap
    def train_step(words, bag, y):
        with tf.GradientTape() as tape:
            tokens = lookup(words)
            vectors = embedding(tokens.to_tensor())
            counts = tf.sparse.to_dense(bag)
            found = head(tf.concat([tf.reduce_mean(tf.tanh(vectors), 1), counts], 1))
            loss = tf.reduce_mean(tf.square(found - y)) + tf.sparse.reduce_sum(bag) / 1e3
            longest = tf.strings.reduce_join(words, 1, separator=" ")
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss, longest, words, bag, tf.cast(found, tf.complex128) * 1j

    steps = [train_step(*each) for each in data]
    found = [np.asarray(each) for each in [*weights, *optimizer.variables, *(step[0] for step in steps)]]
    for _, longest, words, bag, numbers in steps:
        found += [words.row_splits.numpy(), bag.values.numpy(), bag.indices.numpy(), bag.dense_shape.numpy()]
        found += [tf.strings.to_hash_bucket_fast(each, 2**31) for each in (longest, words.flat_values)]
        found += [np.stack([numbers.numpy().real, numbers.numpy().imag])]
    return found


@long
def check_function_takes_ragged_and_sparse_tensors_and_strings():
    data = [texts(rows, seed) for seed, rows in enumerate((7, 7, 7, 4))]
    one = expected(loop_of_texts, data)
    assert_same(loop_of_texts(STRATEGY.function, data), one)
    assert_same(loop_of_texts(lambda step: STRATEGY.function(step, reduce_retracing=True), data), one)
    ends = [0, 3, 3, *[7] * SIZE][: SIZE + 1]
    mine = []
    for words, bag, y in data:
        begin, end = (min(ends[rank], len(y)) for rank in (RANK, RANK + 1))
        own = tf.sparse.slice(bag, [begin, 0], [end - begin, 5])
        mine.append((words[begin:end], own, y[begin:end]))
    for retracing in (False, True):
        assert_same(
            loop_of_texts(lambda s, r=retracing: STRATEGY.function(s, batches="rank", reduce_retracing=r), mine), one
        )


def check_function_takes_ragged_tensors_alone():
    lengths = tf.constant([3, 0, 2, 1, 4])
    whole = tf.RaggedTensor.from_row_lengths(tf.range(10.0), lengths)
    step = lambda x: (tf.reduce_sum(x, 1) / tf.cast(x.nrows(), tf.float32), tf.reduce_max(x))  # noqa: E731
    one = [each.numpy() for each in step(whole)]
    begin, end = RANK * 5 // SIZE, (RANK + 1) * 5 // SIZE
    for retracing in (False, True):
        assert_same([e.numpy() for e in STRATEGY.function(step, reduce_retracing=retracing)(whole)], one)
        found = STRATEGY.function(step, batches="rank", reduce_retracing=retracing)(whole[begin:end])
        assert_same([each.numpy() for each in found], one)


def check_function_does_not_take_what_sparse_tensors_are_made_of_for_rows():
    # As many values and splits as the batch has rows, and a table of as many rows, which is none of the batch.
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(4.0), [4, 0, 0])
    x = tf.reshape(tf.range(8.0), [4, 2])
    step = STRATEGY.function(lambda x, r: (tf.reduce_sum(x * 2), r.values * 1.0, r.row_splits + 0))
    assert_same([each.numpy() for each in step(x, ragged)], [np.float32(56), np.arange(4.0), [0, 4, 4, 4]])


def check_function_refuses_other_compositions_of_rows():
    step = STRATEGY.function(lambda x: tf.reduce_sum(x), batches="rank")
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 1]))
    raises(keras_ddl.errors.ConfigError, "ragged and sparse.*IndexedSlices", lambda: step(slices))
