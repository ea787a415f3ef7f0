"""Datasets that read only a rank's rows: files, PyDatasets, and sources. Run by test_strategy.py."""

import functools
import multiprocessing

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, RankMismatchError
from strategy.common import (
    RANK,
    SIZE,
    STRATEGY,
    WEIGHTS,
    X,
    Y,
    check_equal_on_all_ranks,
    keras,
    raises,
    set_precision,
    shared_folder,
)
from strategy.oracle import Trained, assert_as_one_process, case

layers = keras.layers


def rows_files(folder, lengths):
    """Writes files of consecutively numbered rows and returns their pattern."""
    if RANK == 0:
        for number, length in enumerate(lengths):
            first = sum(lengths[:number])
            np.save(f"{folder}/{number}.npy", np.arange(first, first + length, dtype="float64")[:, None])
    keras_ddl.barrier()
    return f"{folder}/*.npy"


def read_rows(path):
    opened.append(1)
    rows = tf.ensure_shape(tf.numpy_function(lambda name: np.load(name.decode()), [path], tf.float64), [None, 1])
    return rows, tf.cast(rows[:, 0], tf.int64) % 2


opened = []


def check_rows_from_files_are_read_once_per_epoch():
    lengths = [7, 1, 11, 0, 5, 16, 3][: 3 + 2 * SIZE - 2]
    with shared_folder() as folder:
        pattern = rows_files(folder, lengths)
        options = {"batch_size": 4, "shuffle": True, "shuffle_rows": 5, "parallel_files": 2}
        assert_each_row_read_once(keras_ddl.data.from_files(pattern, read_rows, **options), lengths)
        dataset = keras_ddl.data.from_files(pattern, read_rows, **options, count_rows=lambda path: len(np.load(path)))
        assert int(dataset.cardinality()) == len(list(dataset))
        assert_each_row_read_once(dataset, lengths)


def assert_each_row_read_once(dataset, lengths):
    orders = []
    for _ in range(2):
        mine = [x[:, 0].numpy().tolist() for x, _ in dataset]
        everyone = keras_ddl.all_gather_object(mine)
        assert len({len(steps) for steps in everyone}) == 1, "equal numbers of steps"
        assert all(sum(len(steps[k]) for steps in everyone) <= 4 for k in range(len(mine)))
        rows = [row for steps in everyone for step in steps for row in step]
        assert sorted(rows) == list(range(sum(lengths)))
        orders.append(rows)
    assert orders[0] != orders[1]


@long
def check_fit_on_rows_from_files():
    set_precision("float64")
    lengths = [9, 2, 14, 8]
    with shared_folder() as folder:
        pattern = rows_files(folder, lengths)
        dataset = keras_ddl.data.from_files(pattern, read_rows, batch_size=6)
        all_rows = np.arange(33.0)[:, None]
        for arguments in ({}, {"steps_per_execution": 3}):
            with STRATEGY.scope():
                model = keras.Sequential([keras.Input((1,)), layers.Rescaling(0.01), layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], **arguments)
            model.fit(dataset, epochs=2, verbose=0, class_weight={0: 1.0, 1: 3.0}, validation_data=dataset)
            check_equal_on_all_ranks(model)
            steps = int(model.optimizer.iterations)
            assert steps % 2 == 0 and steps >= 2 * 33 / 6
            from_files_loss = model.evaluate(dataset, verbose=0)
            np.testing.assert_allclose(from_files_loss, model.evaluate(all_rows, all_rows % 2, verbose=0), rtol=1e-12)
            assert sorted(model.predict(dataset, verbose=0)[:, 0]) == sorted(model.predict(all_rows, verbose=0)[:, 0])


def check_files_that_differ_between_ranks():
    with shared_folder() as folder:
        read = functools.partial(keras_ddl.data.from_files, reader=read_rows, batch_size=4)
        raises(ConfigError, "must match a file", lambda: read(f"{folder}/none*"))
        pattern = rows_files(folder, [3, 4])
        raises(ConfigError, "1 or more", lambda: read(pattern, batch_size=0))
        raises(
            RankMismatchError,
            r"1 files on rank 0 and 2 on rank 1.*keras_ddl.broadcast_object\(tempfile",
            lambda: read(pattern if RANK else f"{folder}/0.npy"),
        )


class RowBatches(keras.utils.PyDataset):
    """Four batches of 9 rows and one of 7, which can be read by rows; counts the rows read."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.counts = multiprocessing.Value("i", 0)

    def __len__(self):
        return 5

    def batch_rows(self, index):
        return len(X[9 * index : 9 * index + 9])

    def rows(self, index, first, end):
        with self.counts.get_lock():
            self.counts.value += end - first
        rows = slice(9 * index + first, 9 * index + end)
        return X[rows], Y[rows], WEIGHTS[rows]

    def __getitem__(self, index):
        return self.rows(index, 0, self.batch_rows(index))


@long
@case()
def check_py_dataset_read_by_rows_in_worker_processes(scope):
    with scope:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    batches = RowBatches(workers=2, use_multiprocessing=True)
    history = model.fit(batches, epochs=2, shuffle=True, verbose=0).history
    evaluated = model.evaluate(batches, verbose=0)
    if model.distribute_strategy is STRATEGY:
        # Two epochs, one evaluation, and some batches to infer shapes; one process reads 129 rows and those batches.
        assert batches.counts.value <= 1.5 * 129 / SIZE + 20, batches.counts.value
    return Trained(model, {**history, "evaluated": evaluated})


class Source:
    """Rows (x, y) that are read one by one; counts the reads."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.reads += 1
        return {"x": X[index]}, Y[index]


def train_from_source(scope, source):
    with scope:
        inputs = keras.Input((6,), name="x")
        model = keras.Model({"x": inputs}, layers.Dense(2)(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    batches = keras_ddl.data.from_source(source, batch_size=10, shuffle=True, seed=3)
    trained = Trained(model, model.fit(batches, epochs=2, shuffle=False, verbose=0).history)
    if isinstance(source, Source) and model.distribute_strategy is STRATEGY:
        assert source.reads <= 2 * len(X) / SIZE + 30, source.reads  # plus some batches to infer shapes
    return trained


@long
def check_row_sources_and_indexed_datasets():
    indexed = tf.data.Dataset.from_tensor_slices(({"x": X}, Y))
    for make in (Source, lambda: indexed):
        assert_as_one_process(lambda scope, make=make: train_from_source(scope, make()))


def check_source_without_a_length_is_refused():
    with pytest.raises(ConfigError, match="unknown cardinality"):
        keras_ddl.data.from_source(tf.data.Dataset.range(9).filter(lambda i: i > 2), batch_size=2)
    with pytest.raises(ConfigError, match="len\\(source\\) of 1 or more"):
        keras_ddl.data.from_source([], batch_size=2)
