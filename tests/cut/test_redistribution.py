"""Taking shards from whole tensors, gathering lists, and the shapes declared for a rank's lists."""

import numpy as np
import pytest
from cut.counting import report_of
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

raw = tf.raw_ops
X = np.random.default_rng(0).normal(size=(7, 3))
_OF = {"element_dtype": tf.float64}


def same(step, static=True):
    return Simulation(step, [X], 2, static=static).check(X)


def test_shards_with_several_batches_are_cut_from_a_whole_tensor():
    weights = np.random.default_rng(1).normal(size=(21, 1))

    def step(x):
        return tf.tanh(tf.reshape(tf.transpose(x), [-1, 1]) * weights)  # [3 * rows, 1]: one batch per column

    simulation = same(step)
    assert simulation.gathers() == ["is a result"]


@pytest.mark.parametrize("static", [True, False])
def test_list_is_gathered_even_if_empty_or_of_unknown_extent(static):
    def step(x):
        columns = raw.PlaceholderWithDefault(input=3, shape=[])
        empty = raw.EmptyTensorList(element_shape=[-1, -1], max_num_elements=-1, **_OF)
        one = raw.TensorListPushBack(input_handle=empty, tensor=x * 2.0)
        none, _ = raw.TensorListPopBack(input_handle=one, element_shape=[-1, 3], **_OF)
        two = raw.TensorListPushBack(input_handle=one, tensor=x[:, :columns])
        whole = {"element_shape": [-1, 3], "leading_dims": np.zeros(0, np.int64), **_OF}
        return [raw.TensorListConcatV2(input_handle=each, **whole)[0] for each in (one, none, two)]

    simulation = same(step, static)
    assert len(simulation.gathers()) == 3


def test_optional_is_gathered():
    def step(x):
        some = raw.OptionalFromValue(components=[x])
        actual = tf.cond(
            tf.reduce_sum(x) > 100.0, lambda: raw.OptionalFromValue(components=[tf.ones([7, 3], x.dtype)]), lambda: some
        )
        return raw.OptionalGetValue(optional=actual, output_types=[x.dtype], output_shapes=[x.shape])[0]

    assert same(step).gathers()


def test_unset_list_element_fails_as_in_one_process():
    def step(x):
        values = raw.EmptyTensorList(element_shape=[-1, 3], max_num_elements=-1, **_OF)
        values = raw.TensorListPushBack(input_handle=values, tensor=x)
        values, _ = raw.TensorListPopBack(input_handle=values, element_shape=[-1, 3], **_OF)
        values = raw.TensorListResize(input_handle=values, size=1)
        return raw.TensorListGetItem(input_handle=values, index=0, element_shape=[-1, 3], **_OF)

    simulation = Simulation(step, [X], 2)
    for run in (simulation.expected, simulation):
        with pytest.raises(tf.errors.OpError, match="uninitialized"):
            run(X)


def test_list_of_shards_is_gathered_if_an_element_lacks_the_axis():
    def step(x):
        values = raw.EmptyTensorList(element_shape=-1, max_num_elements=-1, **_OF)
        for each in (tf.transpose(x), tf.constant([1.0, 2.0], x.dtype)):
            values = raw.TensorListPushBack(input_handle=values, tensor=each)
        return raw.TensorListLength(input_handle=values)

    assert [each.kind for each in report_of(step, X[:6]).entries] == ["gather"]
