"""Data that differs between ranks, and data of every kind against one process. Run by test_strategy.py."""

import functools
import multiprocessing
import re
import time
import warnings

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, RankMismatchError
from keras_ddl.strategy import data
from keras_ddl.strategy.data import arrays
from strategy.common import LABELS, RANK, SIZE, STRATEGY, WEIGHTS, X, Y, check_equal_on_all_ranks, keras, set_precision
from strategy.oracle import Trained, case, differences

layers = keras.layers
OTHER = np.random.default_rng(RANK)  # the mistake: another state on each rank
FEW = X[:40].astype("float32"), Y[:40].astype("float32")


def compiled(**arguments):
    set_precision("float32")
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        model.compile("sgd", "mse", **arguments)
    return model


def refuses_to_fit(message, x, *, error=RankMismatchError, compile=None, **arguments):
    """Checks that fit raises on every rank before the weights change, and that the ranks can go on."""
    model = compiled(**(compile or {}))
    before = model.get_weights()
    try:
        model.fit(x, verbose=0, **arguments)
    except error as caught:
        assert re.search(message, str(caught), re.DOTALL), str(caught)
    else:
        raise AssertionError(f"no {error.__name__}")
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights()))
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE))
    model.fit(*FEW, batch_size=10, verbose=0)


OTHERS = re.escape(str([*range(1, SIZE)]).replace(",", ""))
FIRST_BATCH = rf"All ranks must read the same batches.*batch 0 of pass 1 .* on rank\(s\) {OTHERS} than.*\(in x, y\)"


def rows_dataset(order=None):
    x, y = FEW if order is None else (FEW[0][order], FEW[1][order])
    return tf.data.Dataset.from_tensor_slices((x, y))


# ---- ranks that read different batches -------------------------------------------------------------------------------


def check_permutation_by_numpy_in_tf_data():
    dataset = rows_dataset(OTHER.permutation(40)).batch(10)
    refuses_to_fit(FIRST_BATCH, dataset)
    refuses_to_fit(FIRST_BATCH, dataset.repeat(), steps_per_epoch=3, compile={"steps_per_execution": 3})
    refuses_to_fit(FIRST_BATCH, dataset, compile={"run_eagerly": True})


def check_permutation_by_numpy_of_arrays():
    order = OTHER.permutation(40)
    refuses_to_fit(r"in one order.*array\(s\) \[0, 1\] of 2", FEW[0][order], y=FEW[1][order], batch_size=10)
    # The first and the last row may be the same all the same.
    order[[0, -1]] = 0, 1
    refuses_to_fit(r"in one order", FEW[0][order], y=FEW[1][order], batch_size=10)
    model = compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(FEW[0] + OTHER.normal(size=(40, 6)), FEW[1], batch_size=10, verbose=0)
    assert any("only if they were drawn at random" in str(w.message) for w in caught) == (RANK == 0)


@long
def check_shuffles_inside_of_other_datasets():
    tf.random.set_seed(None)  # as a script that makes its data before the Strategy, in functions
    halves = [rows_dataset().take(20), rows_dataset().skip(20)]
    nested = tf.data.Dataset.range(2).interleave(lambda _: rows_dataset().shuffle(40)).batch(10)
    flat = tf.data.Dataset.range(2).flat_map(lambda _: rows_dataset().shuffle(40)).batch(10)
    sampled = tf.data.Dataset.sample_from_datasets([half.repeat() for half in halves], [0.5, 0.5]).take(80).batch(10)
    for dataset in (nested, flat, sampled):
        refuses_to_fit("All ranks must read the same batches", dataset)


def check_steps_told_that_order_does_not_matter():
    dataset = rows_dataset().map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False)
    refuses_to_fit(r"deterministic=False in ParallelMapDataset", dataset.batch(10), error=ConfigError)

    def read(i):
        def wait(x, y, j):
            time.sleep(0.05 * (j % SIZE == RANK))  # every row of another file is slow on each rank
            return x, y

        rows = rows_dataset().skip(i * 10).take(10)
        rows = rows.map(lambda x, y: tf.numpy_function(wait, [x, y, i], [x.dtype, y.dtype]))
        return rows.map(lambda x, y: (tf.ensure_shape(x, [6]), tf.ensure_shape(y, [2])))

    interleaved = tf.data.Dataset.range(4).interleave(read, cycle_length=4, num_parallel_calls=4, deterministic=False)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 4  # a rank with few cores would read one file after the other
    refuses_to_fit("All ranks must read the same batches", interleaved.batch(10).with_options(options))


def check_generators_with_a_generator_of_their_own():
    def batches():
        while True:
            rows = OTHER.permutation(40)[:10]
            yield FEW[0][rows], FEW[1][rows]

    refuses_to_fit(FIRST_BATCH, batches(), steps_per_epoch=3)
    signature = (tf.TensorSpec([None, 6]), tf.TensorSpec([None, 2]))
    refuses_to_fit(FIRST_BATCH, tf.data.Dataset.from_generator(batches, output_signature=signature), steps_per_epoch=3)


def check_py_datasets_with_a_generator_of_their_own():
    class Drawn(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            rows = OTHER.permutation(40)[:10]
            return FEW[0][rows], FEW[1][rows]

    refuses_to_fit(FIRST_BATCH, Drawn())
    refuses_to_fit(FIRST_BATCH, Drawn(workers=2))


def check_difference_that_begins_late():
    def batches(rank):
        for i in range(50):
            rows = np.arange(10) + (20 if i == 41 and rank else i % 30)
            yield FEW[0][rows], FEW[1][rows]

    signature = (tf.TensorSpec([None, 6]), tf.TensorSpec([None, 2]))
    late = tf.data.Dataset.from_generator(lambda: batches(RANK), output_signature=signature)
    model = compiled()
    model.fit(late, verbose=0)  # batch 41 is not one that is compared
    late = late.skip(1)
    try:
        model.fit(late, verbose=0)
    except RankMismatchError as error:
        assert "batch 40 of pass 1" in str(error)
    else:
        raise AssertionError("no RankMismatchError")


@long
def check_evaluate_predict_and_loops_compare_too():
    model = compiled()
    dataset = rows_dataset(OTHER.permutation(40)).batch(10)
    for function in (model.evaluate, model.predict):
        try:
            function(dataset, verbose=0)
        except RankMismatchError as error:
            assert re.search(FIRST_BATCH, str(error)), str(error)
        else:
            raise AssertionError("no RankMismatchError")
    # Read ahead of the steps, in another thread.
    shared = STRATEGY.experimental_distribute_dataset(dataset).prefetch(2)
    try:
        for x, y in shared:
            STRATEGY.run(lambda x, y: tf.reduce_sum(x), args=(x, y))
    except RankMismatchError as error:
        assert re.search(FIRST_BATCH, str(error)), str(error)
    else:
        raise AssertionError("no RankMismatchError")


def check_augmentation_of_equal_rows_is_a_warning():
    def batches():
        for i in range(4):
            rows = slice(10 * i, 10 * i + 10)
            yield FEW[0][rows] + OTHER.normal(size=(10, 6)).astype("float32"), FEW[1][rows]

    model = compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(batches(), verbose=0)
    assert any("differs between ranks in x, while" in str(w.message) for w in caught) == (RANK == 0)


def check_ranks_that_stop_reading_early():
    shared = STRATEGY.experimental_distribute_dataset(rows_dataset().repeat().batch(10)).prefetch(8)
    for number, (x, _) in enumerate(shared):
        if number == 2:
            break
        STRATEGY.run(lambda x: tf.reduce_sum(x), args=(x,))
    if RANK == 0:
        next(iter(shared))  # one rank reads more than the others
    compiled().fit(rows_dataset().shuffle(40, seed=1).batch(10).repeat(), steps_per_epoch=3, epochs=2, verbose=0)


# ---- what is read ----------------------------------------------------------------------------------------------------


def check_arrays_are_read_by_the_rows_of_the_rank():
    read = []

    def gather(value, positions, **arguments):
        read.extend([positions] if value.shape == FEW[0].shape else [])
        return stock(value, positions, **arguments)

    stock, tf.gather = tf.gather, gather
    try:
        compiled().fit(*FEW, batch_size=10, verbose=0)
    finally:
        tf.gather = stock
    first, end = data.chunk(10, RANK, SIZE)
    assert read and all(positions.shape.as_list() == [end - first] for positions in read)


@long
def check_arrays_of_every_kind():
    set_precision("float64")
    dense = {"a": X, "b": [X[:, :2], X[:, 2:] > 0]}
    sparse = tf.sparse.from_dense(X * (X > 0.5))

    def program(scope, x, shuffle, **arguments):
        with scope:
            if isinstance(x, dict):
                inputs = {"a": keras.Input((6,)), "b": [keras.Input((2,)), keras.Input((4,))]}
                joined = layers.Concatenate()(
                    [inputs["a"], inputs["b"][0], layers.Lambda(lambda v: keras.ops.cast(v, "float64"))(inputs["b"][1])]
                )
                model = keras.Model(inputs, layers.Dense(2)(joined))
            else:
                inputs = keras.Input((6,), sparse=isinstance(x, tf.SparseTensor))
                model = keras.Model(inputs, layers.Dense(2)(inputs))
            model.compile(keras.optimizers.SGD(0.05), "mse", weighted_metrics=["mae"])
        history = model.fit(x, Y, batch_size=10, epochs=2, shuffle=shuffle, verbose=0, **arguments).history
        return Trained(model, {**history, "predicted": model.predict(x, batch_size=9, verbose=0)})

    for x, shuffle, arguments in (
        (dense, True, {"sample_weight": WEIGHTS, "validation_split": 0.3}),
        (X, "batch", {"validation_data": (X, Y, WEIGHTS), "validation_batch_size": 7}),
        (tf.constant(X), True, {"steps_per_epoch": 3}),
        (sparse, True, {}),
    ):
        found, _ = differences(functools.partial(program, x=x, shuffle=shuffle, **arguments))
        assert not found, f"{type(x).__name__} {shuffle}: " + "\n".join(found)


def rows_files(folder, lengths):
    """Writes files whose rows are numbered through, (features, label), and returns their pattern."""
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


def shared_folder():
    import tempfile

    return keras_ddl.broadcast_object(tempfile.mkdtemp(prefix="keras-ddl-rows-") if RANK == 0 else None)


def check_rows_from_files_come_once_in_each_epoch():
    lengths = [7, 1, 11, 0, 5, 16, 3][: 3 + 2 * SIZE - 2]
    pattern = rows_files(shared_folder(), lengths)
    options = {"batch_size": 4, "shuffle": True, "shuffle_rows": 5, "parallel_files": 2}
    rows_once(keras_ddl.data.from_files(pattern, read_rows, **options), lengths)
    dataset = keras_ddl.data.from_files(pattern, read_rows, **options, count_rows=lambda path: len(np.load(path)))
    assert int(dataset.cardinality()) == len(list(dataset))
    rows_once(dataset, lengths)


def rows_once(dataset, lengths):
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
    pattern = rows_files(shared_folder(), lengths)
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
        of_files = model.evaluate(dataset, verbose=0)
        np.testing.assert_allclose(of_files, model.evaluate(all_rows, all_rows % 2, verbose=0), rtol=1e-12)
        assert sorted(model.predict(dataset, verbose=0)[:, 0]) == sorted(model.predict(all_rows, verbose=0)[:, 0])


def check_arrays_that_ranks_shuffle_in_orders_of_their_own():
    original = arrays._shuffled_whole

    def reversed_on_one_rank(*arguments):
        *others, shuffle = arguments
        return original(*others, (lambda positions: shuffle(positions)[::-1]) if RANK == 1 else shuffle)

    arrays._shuffled_whole = reversed_on_one_rank
    try:
        raises(RankMismatchError, "must read the same batches", lambda: compiled().fit(*FEW, batch_size=8, verbose=0))
    finally:
        arrays._shuffled_whole = original


def check_files_that_are_not_alike():
    folder = shared_folder()
    read = functools.partial(keras_ddl.data.from_files, reader=read_rows, batch_size=4)
    raises(ConfigError, "must match a file", lambda: read(f"{folder}/none*"))
    pattern = rows_files(folder, [3, 4])
    raises(ConfigError, "at least one row for each", lambda: read(pattern, batch_size=1))
    raises(RankMismatchError, "1 files on rank 0 and 2 on rank 1", lambda: read(pattern if RANK else f"{folder}/0.npy"))


def raises(error, message, function):
    try:
        function()
    except error as caught:
        assert re.search(message, str(caught)), str(caught)
    else:
        raise AssertionError(f"no {error.__name__}")


def own_batches(known):
    """One batch more on each rank, of ragged and sparse components, too; `known`: their number is."""
    lengths = [3, 1, 2]

    def make(context):
        ragged = tf.ragged.constant([[i] * (i % 3) for i in range(6)], dtype="float64")
        dataset = tf.data.Dataset.from_tensor_slices((X[:6], {"ragged": ragged, "sparse": tf.sparse.from_dense(Y[:6])}))
        dataset = dataset.batch(2).take(lengths[context.input_pipeline_id])
        return dataset if known else dataset.filter(lambda *batch: True)

    return STRATEGY.distribute_datasets_from_function(make), lengths[:SIZE]


@long
def check_own_data_in_a_tf_function():
    for known in (True, False):
        dataset, lengths = own_batches(known)

        @tf.function
        def count(iterator, steps):
            rows = tf.constant(0)
            for _ in tf.range(steps):
                x, _ = iterator.get_next()
                rows += tf.shape(x)[0]
            return rows

        assert int(count(iter(dataset), 3)) == 2 * lengths[RANK]
        raises(tf.errors.OutOfRangeError, "", lambda: count(iter(dataset), 4))  # noqa: B023

        @tf.function
        def total():
            rows = tf.constant(0)
            for x, parts in dataset:  # noqa: B023
                rows += tf.shape(x)[0] + tf.cast(parts["ragged"].nrows(), tf.int32)
            return rows

        assert int(total()) == 4 * lengths[RANK]
        assert len(list(dataset.repeat(2))) == 6
        assert len(list(dataset.prefetch(2).map(lambda x, parts: (x, parts["sparse"])))) == 3
        # All stop early, one earlier than it has rows.
        for number, _ in enumerate(dataset):
            if number == 1:
                break


class OfRows(keras.utils.PyDataset):
    """Batches of 9 rows and a last one of 7, which can be asked for by rows; remembers how many were read."""

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


def train_of_rows(scope, **arguments):
    with scope:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    batches = OfRows(**arguments)
    history = model.fit(batches, epochs=2, shuffle=True, verbose=0).history
    evaluated = model.evaluate(batches, verbose=0)
    if model.distribute_strategy is STRATEGY:
        # Two epochs and the evaluation, and some batches for their shapes; in one process 129 rows and these.
        assert batches.counts.value <= 1.5 * 129 / SIZE + 20, batches.counts.value
    return Trained(model, {**history, "evaluated": evaluated})


@case()
def check_py_dataset_that_is_asked_for_rows(scope):
    return train_of_rows(scope)


@case()
def check_py_dataset_that_threads_ask_for_rows(scope):
    return train_of_rows(scope, workers=2)


@long
@case()
def check_py_dataset_that_processes_ask_for_rows(scope):
    return train_of_rows(scope, workers=2, use_multiprocessing=True)


# ---- models that are built by their steps ----------------------------------------------------------------------------


@long
@case()
def check_model_whose_call_takes_what_its_steps_make(scope):
    class Siamese(keras.Model):
        def __init__(self):
            super().__init__()
            self.tower = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(2)])

        def call(self, one, other):  # takes two, but data gives it one
            return self.tower(one) - self.tower(other)

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, x[:, ::-1]))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"one": tf.constant(1.0)}

        def test_step(self, batch):
            x, y = batch
            self.compute_loss(x, y, self(x, x[:, ::-1]))
            return {"one": tf.constant(1.0)}

        def predict_step(self, batch):
            return self.tower(batch)

    with scope:
        model = Siamese()
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.tower.build((None, 6))
    model.fit(X, Y, batch_size=10, verbose=0)
    model.evaluate(X, Y, verbose=0)
    return Trained(model, {"predicted": model.predict(X, batch_size=9, verbose=0)})


class OfRagged(keras.Model):
    """Not built, and given ragged numbers of words."""

    def __init__(self):
        super().__init__()
        self.table, self.head = layers.Embedding(12, 3), layers.Dense(1)

    def call(self, words):
        return self.head(tf.reduce_sum(self.table(words.to_tensor(shape=[None, 4])), axis=1))


@case()
def check_ragged_inputs_of_an_unbuilt_model(scope):
    with scope:
        model = OfRagged()
        model.compile(keras.optimizers.SGD(0.05), "mse")
    words = tf.ragged.constant([[(i * 7 + j) % 12 for j in range(1 + i % 4)] for i in range(43)])
    dataset = tf.data.Dataset.from_tensor_slices((words, Y[:, :1], WEIGHTS)).batch(10)
    history = model.fit(dataset, epochs=2, verbose=0, validation_data=dataset).history
    return Trained(model, {**history, "predicted": model.predict(dataset, verbose=0)})


@case()
def check_sparse_inputs_of_tf_data(scope):
    with scope:
        inputs = keras.Input((6,), sparse=True)
        model = keras.Model(inputs, layers.Dense(2)(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X * (X > 0.5)), Y)).batch(10)
    return Trained(model, model.fit(dataset, epochs=2, verbose=0).history)


@long
@case()
def check_infinite_generator_of_dicts_with_class_weights(scope):
    def batches():
        at = 0
        while True:
            rows = np.arange(at, at + 7) % 43
            yield {"a": X[rows, :2], "b": X[rows, 2:]}, LABELS[rows]
            at += 7

    with scope:
        inputs = {"a": keras.Input((2,)), "b": keras.Input((4,))}
        joined = layers.Concatenate()([inputs["a"], inputs["b"]])
        model = keras.Model(inputs, layers.Dense(3, activation="softmax")(joined))
        model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy", steps_per_execution=2)
    signature = (
        {"a": tf.TensorSpec([None, 2], tf.float64), "b": tf.TensorSpec([None, 4], tf.float64)},
        tf.TensorSpec([None], tf.int64),
    )
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    first = model.fit(dataset, epochs=2, steps_per_epoch=4, class_weight=weights, verbose=0).history
    second = model.fit(batches(), epochs=2, steps_per_epoch=4, verbose=0).history
    return Trained(model, {**first, "second": second["loss"]})


# ---- single batches, predictions -------------------------------------------------------------------------------------


def check_train_on_batch_warns_of_equal_rows():
    model = compiled()
    arrays._batches_compared = False
    for rows, expected in (((slice(RANK, RANK + 4)), 0), (slice(0, 4), 1), (slice(0, 4), 0)):
        if expected:
            arrays._batches_compared = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.train_on_batch(FEW[0][rows], FEW[1][rows])
        assert len([w for w in caught if "take each rank's own rows" in str(w.message)]) == expected


def check_predictions_gathered_on_rank_0_only():
    strategy = keras_ddl.Strategy(gather_predictions="rank0")
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    expected = FEW[0] @ model.get_weights()[0]
    found = model.predict(FEW[0], batch_size=10, verbose=0)
    if RANK:
        rows = [np.arange(40)[b : b + 10][slice(*data.chunk(10, RANK, SIZE))] for b in range(0, 40, 10)]
        expected = expected[np.concatenate(rows)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    raises(ConfigError, "'all' or 'rank0'", lambda: keras_ddl.Strategy(gather_predictions="some"))


class Source:
    """Rows (x, y) that are read one by one; remembers how many were."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.reads += 1
        return {"x": X[index]}, Y[index]


def train_from_source(scope, source, **arguments):
    with scope:
        inputs = keras.Input((6,), name="x")
        model = keras.Model({"x": inputs}, layers.Dense(2)(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    batches = keras_ddl.data.from_source(source, batch_size=10, shuffle=True, seed=3, **arguments)
    trained = Trained(model, model.fit(batches, epochs=2, shuffle=False, verbose=0).history)
    if isinstance(source, Source) and model.distribute_strategy is STRATEGY:
        assert source.reads <= 2 * len(X) / SIZE + 30, source.reads  # and some batches for their shapes
    return trained


@case()
def check_source_of_single_rows(scope):
    return train_from_source(scope, Source())


@case()
def check_source_that_threads_read_without_a_remainder(scope):
    return train_from_source(scope, Source(), workers=2, drop_remainder=True)


@case()
def check_source_that_is_a_dataset_with_an_index(scope):
    return train_from_source(scope, tf.data.Dataset.from_tensor_slices(({"x": X}, Y)))


def check_source_without_a_length_is_refused():
    with pytest.raises(ConfigError, match="unknown cardinality"):
        keras_ddl.data.from_source(tf.data.Dataset.range(9).filter(lambda i: i > 2), batch_size=2)
    with pytest.raises(ConfigError, match="len\\(source\\) of 1 or more"):
        keras_ddl.data.from_source([], batch_size=2)
