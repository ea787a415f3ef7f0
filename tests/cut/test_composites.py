"""Steps with ragged and sparse tensors equal one process, and the network behind them is cut."""

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.rows import rows_of
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.step.arguments import Arguments

RNG = np.random.default_rng(0)
TOKENS, LENGTHS, LABELS = RNG.integers(0, 50, [12, 6]), RNG.integers(0, 7, 12), RNG.normal(size=(12, 1))
TABLE, FIRST, SECOND = (RNG.normal(size=shape) for shape in ([50, 8], [8, 16], [16, 1]))


def padded(table, tokens):
    return tf.reduce_mean(tf.gather(table, tokens.to_tensor()), 1)


def flat_values(table, tokens):
    return tf.reduce_sum(tf.ragged.map_flat_values(lambda each: tf.gather(table, each), tokens), 1)


def means(table, tokens):
    return tf.reduce_mean(tf.ragged.map_flat_values(lambda each: tf.gather(table, each), tokens) * 2.0, 1)


def sparse_look_up(table, tokens):
    return tf.nn.safe_embedding_lookup_sparse(table, tokens.to_sparse(), combiner="mean")


def sparse_product(table, tokens):
    sparse = tf.cast(tokens, tf.float64).to_sparse()
    return tf.sparse.sparse_dense_matmul(sparse, table[: sparse.dense_shape[1]])


VECTORS = [padded, flat_values, sparse_look_up, sparse_product]


@pytest.mark.parametrize(
    ("several", "static"),
    [
        ([sparse_look_up], False),
        *(pytest.param(VECTORS, each, marks=pytest.mark.long) for each in (True, False)),
    ],
    ids=["few", "static", "open"],
)
def test_network_behind_ragged_tokens_is_cut(several, static):
    variables = [tf.Variable(each) for each in (TABLE, FIRST, SECOND)]

    def step(tokens, lengths, labels):
        ragged, filled = (tf.RaggedTensor.from_tensor(tokens, each) for each in (lengths, lengths + 1))
        with tf.GradientTape() as tape:
            table, first, second = [tf.convert_to_tensor(each) for each in variables]
            tape.watch([table, first, second])
            vectors = [*(each(table, ragged) for each in several), means(table, filled)]
            losses = [tf.reduce_mean(tf.square(tf.tanh(each @ first) @ second - labels)) for each in vectors]
            loss = tf.add_n(losses)
        return [*losses, *map(tf.convert_to_tensor, tape.gradient(loss, [table, first, second]))]

    given = (TOKENS, LENGTHS, LABELS)
    simulation = Simulation(step, given, 3, static=static, variables=variables).check(*given)
    sums = [each for each in simulation.reports[0].entries if each.kind == "sum"]
    assert len(sums) == 1 and len(sums[0].values) >= 3, simulation.reports[0].text()


def test_square_weights_stay_whole_if_the_batch_has_their_extent():
    weights = tf.Variable(RNG.normal(size=(12, 12)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights))
        gradient = tape.gradient(loss, weights)
        gradient /= tf.norm(gradient)
        for _ in range(3):
            gradient = 1.5 * gradient - 0.5 * gradient @ tf.transpose(gradient) @ gradient
        weights.assign_sub(gradient)
        return loss

    simulation = Simulation(step, (RNG.normal(size=(12, 12)),), 2, variables=[weights])
    simulation(RNG.normal(size=(12, 12)))
    assert len(simulation.reports[0].entries) == 1, simulation.reports[0].text()


def test_gathered_value_is_reused_in_a_branch():
    def step(x):
        order = tf.sort(x, 0)
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sort(order * 1.0, 0) + order, lambda: order[::-1])

    x = np.abs(RNG.normal(size=(7, 3)))
    Simulation(step, (x,), 3).check(x)


def arguments_of(structure, rows, **options):
    return Arguments(structure, has_rows=lambda _, leaf: rows_of(leaf) == rows, **options)


def test_composites_are_whole_and_open():
    ragged, bag = tf.ragged.constant([[1, 2], [], [3]]), tf.sparse.from_dense([[1.0, 0.0]] * 3)
    other = tf.ragged.constant([[1], [2]])
    found = arguments_of(([{"ragged": ragged, "bag": bag}, [other, tf.ones([3, 3]), 7]], {}), 3, own_rows=True)
    specs = found.specs(9)
    shapes = [each if isinstance(each, tuple) else each.as_list() for each in found.shapes(specs)]
    assert shapes == [(None, 2), (None,), (2,), (None,), (None,), (None,), (3,), (9, 3)]
    assert [each.shape.as_list() for each in specs] == [[9, 2], [9, None], [2, None], [9, 3]]
    assert [type(each).__name__ for each in found.placements] == ["Replicated"] * 7 + ["Sharded"]
    step = found.bound(lambda named, others: (named["ragged"].nrows(), others[2]), found.specs(None))
    assert step(*found.tensors) == (3, 7)
    shorter = {"ragged": ragged[:2], "bag": tf.sparse.slice(bag, [0, 0], [2, 2])}
    more = arguments_of(([shorter, [other, tf.ones([3, 3]), 7]], {}), 2, own_rows=True)
    assert more.key(repr) != found.key(repr)  # `other` may now have the batch's rows


def test_composites_of_other_kinds_are_refused_only_as_rows():
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 1]))
    assert len(arguments_of(((slices, tf.ones([2])), {}), 2, own_rows=False).tensors) == 3
    with pytest.raises(ConfigError, match="ragged and sparse.*Received: IndexedSlices"):
        arguments_of(((slices,), {}), 2, own_rows=True)
