"""Host functions and their output: rank 0 alone runs them, once."""

import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

X = np.random.default_rng(0).normal(size=(7, 3))


@pytest.mark.parametrize("static", [True, False])
def test_host_functions_run_once_and_all_ranks_get_the_results(static):
    calls = []

    def count(x):
        calls.append(x.shape)
        return x[:2] + len(calls), np.array([len(calls) > 0])

    def step(x):
        some, flag = tf.numpy_function(count, [2.0 * x], [tf.float64, tf.bool])
        return tf.reshape(some, [2, 3]), flag

    simulation = Simulation(step, (X,), 3, static=static)
    found = simulation(X)
    assert calls == [(7, 3)]
    for some, flag in found:
        np.testing.assert_array_equal(some, 2.0 * X[:2] + 1)
        np.testing.assert_array_equal(flag, [True])


def test_host_prints_all_rows_once(capfd):
    def step(x):
        tf.print("sum of", tf.shape(x)[0], "rows", summarize=-1)
        return tf.reduce_sum(x)

    Simulation(step, (X,), 2)(X)
    assert capfd.readouterr().err.count("sum of 7 rows") == 1


def test_host_functions_return_strings_and_complex_numbers_on_all_ranks():
    def step(x):
        texts = tf.numpy_function(lambda a: np.array([b"one", b"two"]), [x], tf.string)
        return texts, tf.numpy_function(lambda a: a[0] * 2j, [x], tf.complex128)

    Simulation(step, (X,), 2).check(X)


def test_host_functions_with_other_dtypes_are_refused():
    def step(x):
        return tf.raw_ops.PyFunc(input=[x], token="none", Tout=[tf.variant])

    with pytest.raises(ConfigError, match="numbers, booleans or strings.*variant.*rank"):
        Simulation(step, (X,), 2)(X)


@pytest.mark.parametrize("static", [True, False])
def test_time_and_unseeded_numbers_are_equal_on_all_ranks(static):
    def step(x):
        numbers = tf.raw_ops.NonDeterministicInts(shape=[4], dtype=tf.int64)
        return x * 0 + tf.timestamp(), tf.timestamp(), numbers

    rows, times, numbers = zip(*Simulation(step, (X,), 3, static=static)(X))
    assert len({float(time) for time in times}) == 1 and float(times[0]) > 1e9
    assert len({float(entry) for part in rows for entry in part.reshape(-1)}) == 1
    assert all(np.array_equal(each, numbers[0]) for each in numbers) and len(set(numbers[0].tolist())) == 4


@pytest.mark.long
def test_summaries_cover_all_rows_and_are_written_once(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))

    def step(x):
        with writer.as_default(step=3):
            tf.summary.scalar("sum", tf.reduce_sum(x))
            tf.summary.histogram("rows", x[:, 0])
        return tf.reduce_max(x)

    Simulation(step, (X,), 3)(X)
    writer.close()
    (file,) = tmp_path.iterdir()
    events = [value for event in tf.compat.v1.train.summary_iterator(str(file)) for value in event.summary.value]
    found = {value.tag: tf.make_ndarray(value.tensor) for value in events}
    assert len(events) == 2
    np.testing.assert_allclose(found["sum"], X.sum(), rtol=1e-6)
    assert found["rows"][:, 2].sum() == len(X)
