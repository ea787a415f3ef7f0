"""Cutting a global batch into the ranks' rows; it is not collective, so one process suffices."""

import time

import numpy as np
import pytest

from keras_ddl import data
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import order
from keras_ddl.errors import ConfigError


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_chunk_partitions_rows(size):
    for rows in (0, 1, size - 1, size, size + 1, 100, 2**40 + 3):
        chunks = [data.chunk(rows, rank, size) for rank in range(size)]
        assert chunks[0][0] == 0 and chunks[-1][1] == rows
        assert all(a[1] == b[0] for a, b in zip(chunks, chunks[1:]))
        lengths = [end - first for first, end in chunks]
        assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
        assert [tuple(map(int, data.chunk(tf.constant(rows, tf.int64), r, size))) for r in range(size)] == chunks


def test_take_chunk_of_every_kind_of_tensor():
    size = 3
    dense = np.arange(20).reshape(10, 2)
    ragged = tf.ragged.constant([[i] * (i % 4) for i in range(10)])
    sparse = tf.sparse.from_dense(dense * (dense % 3 == 0))
    assert data.take_chunk(tf.constant(7), 1, size) == 7
    assert data.take_chunk("text", 1, size) == "text"
    np.testing.assert_array_equal(
        np.concatenate([data.take_chunk(tf.constant(dense), r, size) for r in range(size)]), dense
    )
    assert sum((data.take_chunk(ragged, r, size).to_list() for r in range(size)), []) == ragged.to_list()
    parts = [tf.sparse.to_dense(data.take_chunk(sparse, r, size)) for r in range(size)]
    np.testing.assert_array_equal(np.concatenate(parts), tf.sparse.to_dense(sparse))


@pytest.mark.parametrize("drop_remainder", [True, False])
def test_share_dataset_partitions_every_batch(drop_remainder):
    source = {"x": np.arange(22), "y": (np.arange(44).reshape(22, 2),)}
    dataset = tf.data.Dataset.from_tensor_slices(source).batch(5, drop_remainder=drop_remainder)
    shares = [list(data.share_dataset(dataset, rank, 7)) for rank in range(7)]  # two ranks get no rows
    for batch, *parts in zip(dataset, *shares):
        np.testing.assert_array_equal(np.concatenate([p["x"] for p in parts]), batch["x"])
        np.testing.assert_array_equal(np.concatenate([p["y"][0] for p in parts]), batch["y"][0])
    spec = data.share_dataset(dataset, 2, 7).element_spec
    assert spec["x"].shape.as_list() == ([1] if drop_remainder else [None])


def test_share_dataset_keeps_structures_and_values_without_rows():
    dataset = tf.data.Dataset.from_tensors((np.arange(6),))
    assert isinstance(data.share_dataset(dataset, 0, 2).element_spec, tuple)
    one, row_less = next(iter(data.share_dataset(tf.data.Dataset.from_tensors((np.arange(6), 3.0)), 1, 2)))
    np.testing.assert_array_equal(one, [3, 4, 5])
    assert row_less == 3.0


def test_share_dataset_cuts_once():
    dataset = tf.data.Dataset.range(12).batch(6)
    shared = data.share_dataset(dataset, 1, 2)
    assert data.share_dataset(shared, 1, 2) is shared
    assert not data.is_shared(dataset)
    later = shared.map(lambda v: v + 1).prefetch(1)
    assert data.is_shared(later) and data.share_dataset(later, 1, 2) is later
    assert data.share_dataset(dataset, 0, 1) is dataset


@pytest.mark.parametrize("seeds", [(None,), (1, None), (None, 1)])
def test_share_dataset_refuses_a_shuffle_without_a_seed(seeds):
    tf.random.set_seed(None)  # other tests may have set a global seed, which is also accepted
    dataset = tf.data.Dataset.range(8)
    for seed in seeds:
        dataset = dataset.shuffle(8, seed=seed)
    with pytest.raises(ConfigError, match="shuffle the same way.*without a seed.*after keras_ddl.Strategy"):
        data.share_dataset(dataset.batch(4).map(lambda v: v), 0, 2)


def test_share_dataset_is_deterministic():
    dataset = tf.data.Dataset.range(64).batch(4)

    def wait_in_the_first(batch):
        time.sleep(0.5 if batch[0] == 0 else 0.0)  # later batches could overtake it
        return batch

    slow_first = dataset.map(
        lambda v: tf.ensure_shape(tf.numpy_function(wait_in_the_first, [v], tf.int64), [4]), num_parallel_calls=8
    )
    options = tf.data.Options()
    options.deterministic = False
    shared = data.share_dataset(slow_first.with_options(options), 0, 2)
    assert [int(rows[0]) for rows in shared] == list(range(0, 64, 4))


def test_row_count_takes_the_first_rows():
    assert int(data.row_count((3.0, {"a": tf.zeros([5, 2])}, tf.zeros([7])))) == 5
    assert int(data.row_count(((np.zeros((4, 1)),), {}))) == 4
    assert int(data.row_count((tf.ragged.constant([[1], [2, 3]]),))) == 2
    assert int(data.row_count((tf.sparse.from_dense([[1], [0], [2]]),))) == 3
    assert data.row_count((tf.constant(1.0), tf.Variable([1.0, 2.0]), None)) is None


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "uint8", "int64", "bool", "complex64"])
def test_digest_tells_batches_apart(dtype):
    values = np.arange(2400).reshape(80, 30) ** 2 % 97
    batch = tf.cast(values % 2 if dtype == "bool" else values, dtype)
    words = order.digest([batch]).numpy()
    assert words[0] % 2 == 1 and not words[1:].any()
    np.testing.assert_array_equal(order.digest([tf.identity(batch)]), words)
    swapped = tf.gather(batch, [1, 0, *range(2, 80)])
    assert order.digest([swapped])[0] != words[0]


def test_digest_of_every_kind_of_component():
    alike = order.digest([tf.ones([4, 3]), tf.zeros([0, 2]), tf.constant(3.0)]).numpy()
    assert (alike % 2 == 0).all(), "they do not tell rows apart"
    assert order.digest([tf.zeros([4, 3])])[0] != alike[0]
    texts = tf.constant(["one", "two"])
    assert order.digest([texts])[0] != order.digest([texts[::-1]])[0]
    no_texts = tf.fill([4, 0], "")  # for example a padded batch of empty lists
    first, second = [order.digest([each])[0] for each in (no_texts, tf.identity(no_texts))]
    assert first == second and first % 2 == 0
    ragged = [tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[1, 2], [3]])]
    assert order.digest(ragged[:1])[0] != order.digest(ragged[1:])[0]
    sparse = [tf.sparse.from_dense([[0, 1], [2, 0]]), tf.sparse.from_dense([[1, 0], [0, 2]])]
    assert order.digest(sparse[:1])[0] != order.digest(sparse[1:])[0]
    many = [tf.range(3) + i for i in range(7)]
    assert order.digest(many)[3] != order.digest([*many[:6], many[0]])[3]
    large = tf.random.stateless_normal([3000, 500], [1, 2])
    assert order.digest([large])[0] != order.digest([large[::-1]])[0]


def test_notes_of_a_batch_are_compared_between_ranks(monkeypatch):
    monkeypatch.setitem(order._components, 5, ["x", "y"])
    monkeypatch.setattr(order._notes(), "unlike", None)
    key = order.BatchKey(dataset=5, pass_=2, batch=0).packed()
    assert order.BatchKey.of(key + 1) == (5, 2, 1)

    def reports(*of_ranks):
        lists = np.zeros([3, 8, 5], np.int64)
        for rank, notes in enumerate(of_ranks):
            lists[rank, : len(notes)] = notes
        return lists.reshape(3, -1)

    first, second = [key, 7, 9, 0, 0], [key + 1, 3, 4, 0, 0]
    late = reports([first, second], [second], [second, first])
    assert order._difference(late) == b"" and order._notes().unlike is None
    drawn = reports([first], [[key, 11, 9, 0, 0]], [first])
    assert order._difference(drawn) == b"" and order._notes().unlike == (0, "x")
    constant_rows = reports([first], [[key, 7, 10, 0, 0]], [[key, 8, 9, 0, 0]])  # 8: all its rows are equal
    assert order._difference(constant_rows) == b""
    other = reports([second, first], [second], [[key, 13, 15, 0, 0], [key + 1, 5, 6, 0, 0]])
    text = order._difference(other).decode()
    assert "batch 0 of pass 2 over dataset 5 differs on rank(s) [2] from that on rank 0 (in x, y)" in text
