"""Gradients of the collectives against one process that has the tensors of all ranks. Run by test_ops_on_ranks.py.

The oracle builds every rank's loss from all ranks' inputs with plain TensorFlow ops, and differentiates the sum of the
losses with respect to this rank's input. First and second derivatives, eager and in a tf.function.
"""

import functools

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()


def tensors(shapes) -> list[tf.Tensor]:
    return [tf.constant(np.random.default_rng([7, rank]).normal(size=shape)) for rank, shape in enumerate(shapes)]


def weights(like: tf.Tensor, rank: int) -> tf.Tensor:
    count = int(np.prod(like.shape))
    return tf.reshape(tf.constant(np.random.default_rng([8, rank]).normal(size=count)), like.shape)


def loss_of(y: tf.Tensor, rank: int) -> tf.Tensor:
    return tf.reduce_sum(weights(y, rank) * y * y)


def distributed(collective, x):
    with tf.GradientTape() as second:
        second.watch(x)
        with tf.GradientTape() as first:
            first.watch(x)
            y = collective(x)
            loss = loss_of(tf.ensure_shape(y, SHAPES[RANK]) if SHAPES else y, RANK)
        gradient = first.gradient(loss, x)
        total = tf.reduce_sum(gradient * weights(x, RANK + 100))
    return y, gradient, second.gradient(total, x)


def oracle(collective, xs):
    with tf.GradientTape() as second:
        second.watch(xs)
        with tf.GradientTape() as first:
            first.watch(xs)
            ys = collective(xs)
            loss = tf.add_n([loss_of(y, rank) for rank, y in enumerate(ys)])
        gradients = first.gradient(loss, xs, unconnected_gradients="zero")
        total = tf.add_n([tf.reduce_sum(g * weights(x, r + 100)) for r, (g, x) in enumerate(zip(gradients, xs))])
    seconds = second.gradient(total, xs, unconnected_gradients="zero")
    return ys[RANK], gradients[RANK], seconds[RANK]


SHAPES = None


def compare(collective, single, xs, name: str) -> None:
    """Compares `collective(x)` on this rank with `single(xs)`, which returns every rank's result in one process."""
    global SHAPES
    expected = oracle(single, xs)
    SHAPES = [y.shape for y in single(xs)]
    results = {
        "eager": distributed(collective, xs[RANK]),
        "graph": tf.function(lambda x: distributed(collective, x), autograph=False)(xs[RANK]),
    }
    for mode, result in results.items():
        for order, (actual, wanted) in enumerate(zip(result, expected)):
            np.testing.assert_allclose(actual, wanted, rtol=1e-11, atol=1e-11, err_msg=f"{name} {mode} order {order}")


def reduce_all(op: str, xs) -> tf.Tensor:
    if op == "product":
        return functools.reduce(tf.multiply, xs)
    reductions = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "min": tf.reduce_min, "max": tf.reduce_max}
    return reductions[op](tf.stack(xs), 0)


def check_all_reduce_gradient_equals_one_process():
    ties = [tf.constant([0.0, 2.0, 0.0, float(r), 3.0, 1.5 * (r < SIZE - 1)], tf.float64) for r in range(SIZE)]
    cases = [
        *((op, tensors([(4, 3)] * SIZE)) for op in ("sum", "mean")),
        *((op, ties) for op in ("min", "max", "product")),
    ]
    for op, xs in cases:
        compare(lambda x, op=op: ops.all_reduce(x, op=op), lambda xs, op=op: [reduce_all(op, xs)] * SIZE, xs, op)


def check_all_reduce_n_gradient_equals_one_process():
    def through(x, op):
        parts = ops.all_reduce_n([x[:2], tf.square(x[2:]), x[0, 0]], op=op)
        return tf.concat([tf.reshape(part, [-1]) for part in parts[:2]], 0) * parts[2]

    def single(xs, op):
        parts = [reduce_all(op, part) for part in ([x[:2] for x in xs], [tf.square(x[2:]) for x in xs])]
        scale = reduce_all(op, [x[0, 0] for x in xs])
        return [tf.concat([tf.reshape(part, [-1]) for part in parts], 0) * scale] * SIZE

    compare(lambda x: through(x, "mean"), lambda xs: single(xs, "mean"), tensors([(4, 3)] * SIZE), "mean")


def check_broadcast_gradient_equals_one_process():
    for root in (0, SIZE - 1):
        xs = tensors([(4, 3)] * SIZE)
        compare(lambda x, root=root: ops.broadcast(x, root), lambda xs, root=root: [xs[root]] * SIZE, xs, f"{root}")


def check_reduce_scatter_gradient_equals_one_process():
    rows = 2 * SIZE + 1
    cuts = [0]
    for rank in range(SIZE):
        cuts.append(cuts[-1] + rows // SIZE + (rank < rows % SIZE))

    def single(xs, op):
        total = reduce_all(op, xs)
        return [total[cuts[rank] : cuts[rank + 1]] for rank in range(SIZE)]

    for op in ("mean", "max"):
        xs = tensors([(rows, 2)] * SIZE)
        compare(lambda x, op=op: ops.reduce_scatter(x, op=op), lambda xs, op=op: single(xs, op), xs, op)


def check_all_gather_gradient_equals_one_process_with_uneven_rows():
    for first in (0, 2):
        xs = tensors([(first + rank, 3) for rank in range(SIZE)])
        compare(ops.all_gather, lambda xs: [tf.concat(xs, 0)] * SIZE, xs, "rows")
    compare(ops.all_gather, lambda xs: [tf.stack(xs)] * SIZE, tensors([()] * SIZE), "scalars")


def check_all_to_all_gradient_equals_one_process():
    table = [[(s + 2 * r) % 3 + 1 for r in range(SIZE)] for s in range(SIZE)]

    def single(xs):
        parts = [tf.split(x, table[s]) for s, x in enumerate(xs)]
        return [tf.concat([parts[s][r] for s in range(SIZE)], 0) for r in range(SIZE)]

    compare(
        lambda x: ops.all_to_all(x, table[RANK])[0], single, tensors([(sum(row), 2) for row in table]), "all_to_all"
    )


@long
def check_adasum_gradient_equals_one_process():
    def single(xs):
        while len(xs) > 1:
            pairs = []
            for a, b in zip(xs[::2], xs[1::2]):
                dot = tf.reduce_sum(a * b)
                shares = [1 - dot / (2 * tf.reduce_sum(x * x)) for x in (a, b)]
                pairs.append(shares[0] * a + shares[1] * b)
            xs = pairs + xs[2 * len(pairs) :]
        return [xs[0]] * SIZE

    compare(lambda x: ops.all_reduce(x, op="adasum"), single, tensors([(4, 3)] * SIZE), "adasum")


def check_gradients_of_several_losses_in_one_graph_with_an_unused_output():
    @tf.function
    def two_losses(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y, _ = ops.all_reduce_n([x, tf.ones([3])], name="shared")
            losses = [tf.reduce_sum(y * (RANK + 1.0)), tf.reduce_sum(y * (RANK + 2.0))]
        return [tape.gradient(loss, x) for loss in losses]

    for number, gradient in enumerate(two_losses(tf.ones([5])), 1):
        np.testing.assert_allclose(gradient, np.full(5, np.sum(np.arange(SIZE) + float(number))))


def check_gradient_through_branches_and_nested_functions():
    inner = tf.function(lambda x: ops.all_reduce(tf.square(x), name="inner"))

    @tf.function
    def graph(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(tf.size(x) > 1, lambda: inner(x), lambda: ops.all_reduce(x))
            for _ in tf.range(3):
                y = ops.all_reduce(y, op="mean")
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    x = tf.constant([1.0 + RANK, 3.0])
    np.testing.assert_allclose(graph(x), SIZE * 2 * x, rtol=1e-6)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(inner(x))
    np.testing.assert_allclose(tape.gradient(loss, x), SIZE * 2 * x, rtol=1e-6)
