"""Which components of a batch have their own number of rows, judged by specs, pipelines and a first batch."""

import numpy as np
import pytest

from keras_ddl.compat import datasets
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.rows import BatchRows, chunked_rows, component_rows, row_totals_and_outliers

X = np.arange(24.0).reshape(12, 2)


def test_unlike_rows_belong_to_the_minority_of_components():
    assert row_totals_and_outliers([[100, 8, 8, None]] * 2) == ([200, 16, 16, None], (frozenset((0,)),))
    assert (
        row_totals_and_outliers([[40, 5]] * 2)[1] == row_totals_and_outliers([[5, 40]] * 2)[1] == (frozenset((1,)),)
    ), "the first component is the reference"
    images_and_labels = ("unlabelled", ("labelled", "labels"))
    assert row_totals_and_outliers([[80, 10, 10]], images_and_labels)[1] == (frozenset((1, 2)),), (
        "on a tie, the first element is the reference"
    )
    assert row_totals_and_outliers([[8, 100, 8]], ({"x": "", "weights": ""}, "y"))[1] == (frozenset((1,)),)
    assert row_totals_and_outliers([[2, 3, 1], [1, 3, 1]]) == ([3, 6, 2], (frozenset((1,)), frozenset((2,))))
    assert row_totals_and_outliers([[2, 1], [1, 2]])[1] == (frozenset((1,)),), (
        "equal totals, but different rows per rank"
    )
    assert (
        row_totals_and_outliers([[4, 4]] * 3)[1]
        == row_totals_and_outliers([[None]])[1]
        == row_totals_and_outliers([[]])[1]
        == ()
    )


def test_chunked_rows_follow_the_spec():
    spec = (tf.TensorSpec([10, 3]), tf.TensorSpec([80]), {"a": tf.TensorSpec([]), "b": tf.TensorSpec([10])})
    rows = chunked_rows(spec, may_differ=True)
    assert (rows.total, rows.others, rows.may_differ) == (10, (frozenset((1,)),), False)
    assert rows.rows_of_rank(4, 0, 3) == [4, None, 4, 4]
    assert rows.for_kind(tf.nest.flatten(spec)).total == 10
    assert chunked_rows((spec[1], (spec[0], spec[0]))).total == 80
    open_spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None]), tf.OptionalSpec(None))
    assert chunked_rows(open_spec, may_differ=True).may_differ
    assert not chunked_rows(open_spec[1:], may_differ=True).may_differ, "one component"
    assert BatchRows().learn([[4, 2]]).other_components == {1}


def batched(rows=4):
    return tf.data.Dataset.from_tensor_slices((X, X)).batch(rows)


OPEN = tf.TensorSpec([None, 2])


def generated(spec):
    return tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)


@pytest.mark.parametrize(
    ("dataset", "at_once"),
    [
        (batched().map(lambda x, y: (x + 1, y), num_parallel_calls=2).prefetch(2).repeat(2), True),
        (tf.data.Dataset.zip((batched(4), batched(2))).prefetch(1), False),
        (tf.data.Dataset.zip((batched(4), batched(2))).map(lambda a, b: (a[0], b[0])), False),
        (tf.data.Dataset.zip((tf.data.Dataset.range(9), tf.data.Dataset.range(9))).batch(3), True),
        (batched().unbatch(), True),
        (tf.data.Dataset.from_generator(lambda: iter([X]), output_signature=tf.TensorSpec([None, 2])), False),
        (tf.data.Dataset.from_tensors((X, X)), False),
    ],
)
def test_is_batched_at_once(dataset, at_once):
    assert datasets.is_batched_at_once(dataset) == at_once


@pytest.mark.parametrize(
    ("dataset", "may_differ"),
    [
        (generated((OPEN, OPEN)), False),
        (generated((OPEN, (OPEN, OPEN))), True),
        (generated({"a": OPEN, "b": OPEN}), True),
        (batched(), False),
        (tf.data.Dataset.zip((tf.data.Dataset.from_tensors(X), tf.data.Dataset.from_tensors(X[:3]))), True),
        (tf.data.Dataset.zip((batched(4), batched(2))).map(lambda a, b: (a[0], b[0])), True),
    ],
)
def test_components_may_differ_if_zipped_or_nested(dataset, may_differ):
    assert datasets.components_may_differ(dataset) == may_differ


def test_continued_yields_the_read_element_first():
    def read(dataset):
        iterator = iter(dataset)
        return datasets.continued(next(iterator), iterator)

    dataset = tf.data.Dataset.zip((batched(5), batched(3)))
    expected = [component_rows(each) for each in dataset]
    again = read(dataset)
    assert again.element_spec == dataset.element_spec

    @tf.function
    def in_a_function(iterator):
        return iterator.get_next()

    found = [component_rows(in_a_function(again)), *(component_rows(each) for each in again)]
    assert found == expected == [[5, 5, 3, 3], [5, 5, 3, 3], [2, 2, 3, 3]]
    with pytest.raises(tf.errors.OutOfRangeError):
        in_a_function(again)
    original = iter(batched(3))  # its position after a first execution of two steps
    again = datasets.continued(next(original), original)
    found = [next(again)[0], next(again)[0], *(x for x, _ in original)]
    np.testing.assert_array_equal(np.concatenate(found), X)
