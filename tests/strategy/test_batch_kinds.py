"""Batches are retraced as by tf.function(reduce_retracing=True) for global batches."""

import random

import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.rows import global_batch
from keras_ddl.strategy.step.batch_kinds import BatchKinds


def traced_by_tensorflow(batches):
    """Returns the shapes that each batch is traced for, or None if an earlier trace serves it."""
    traced = []

    @tf.function(reduce_retracing=True, autograph=False)
    def step(batch):
        traced[-1] = [tuple(leaf.shape) for leaf in tf.nest.flatten(batch) if leaf is not None]

    for batch in batches:
        traced.append(None)
        step(batch)
    return traced


def traced_by_kinds(batches, rows_of_part):
    """Returns the same as seen from a rank with `rows_of_part` rows of each batch."""
    kinds, seen, traced = BatchKinds(), [], []
    for batch in batches:
        part = tf.nest.map_structure(lambda leaf: leaf if leaf is None else leaf[:rows_of_part], batch)
        kind = kinds.of(global_batch(part, len(tf.nest.flatten(batch)[0])))
        is_new = all(kind is not each for each in seen)
        seen.append(kind)
        traced.append([tuple(spec.shape) for spec in kind.specs] if is_new else None)
    return traced


def batch_of(chosen):
    rows, columns = chosen.choice([1, 2, 4, 7]), chosen.choice([3, 3, 3, 5])
    x = tf.zeros([rows, columns], chosen.choice(["float32", "float32", "float64"]))
    kind = chosen.randrange(4)
    if kind == 0:
        return (x,)
    if kind == 1:
        return {"a": x, "b": tf.zeros([rows])}, tf.zeros([rows, 2])
    return (x, tf.zeros([rows, 1]), None) if kind == 2 else (x, tf.zeros([rows, 1]))


@pytest.mark.parametrize("seed", range(8))
def test_batch_kinds_match_the_traces_of_one_process(seed):
    chosen = random.Random(seed)
    batches = [batch_of(chosen) for _ in range(25)]
    expected = traced_by_tensorflow(batches)
    assert any(each is None for each in expected)
    for rows_of_part in (0, 1, 3):
        assert traced_by_kinds(batches, rows_of_part) == expected
