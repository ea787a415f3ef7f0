"""Tables in flat shards whose rows move between ranks, and not the tables: look-ups and gradients of one process."""

import keras
import numpy as np
import pytest
from cut.simulated import SimulatedCollectives, Simulation
from cut.test_gathered_weights import Trained

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.shards import row_order, table_rows
from keras_ddl.cut.values.layouts import Layout

RNG = np.random.default_rng(4)
ROWS, WIDTH = 211, 4
# Of rows that all ranks have; some of them several times, on one rank and on several.
IDS = (7 * RNG.integers(0, 30, (7, 5))).astype("int32")
FEW = IDS[:2]  # rows for two ranks
LONG = pytest.mark.long


@pytest.fixture(autouse=True)
def drawn_from_a_seed(float64):
    keras.utils.set_random_seed(3)


@pytest.fixture
def small_batches(monkeypatch):
    """Batches of open extents are taken for small ones."""
    monkeypatch.setattr(table_rows, "USUAL_BYTES", 100)
    monkeypatch.setattr(table_rows, "USUAL_LINES", 7)


@pytest.fixture
def sent_rows(monkeypatch):
    """The rows of tables that ranks send, by rank and name of the exchange."""
    sent = {}
    all_to_all = SimulatedCollectives.all_to_all

    def counted(self, tensor, splits, name, depths=None):
        def note(rows):
            sent[self.rank, name] = rows
            return rows

        if tensor.dtype == tf.float64:
            tensor = tf.numpy_function(note, [tensor], tf.float64)
            tensor.set_shape([None, WIDTH])
        return all_to_all(self, tensor, splits, name, depths)

    monkeypatch.setattr(SimulatedCollectives, "all_to_all", counted)
    return sent


class LookedUp(keras.Model):
    """Looks rows up in a table as `call` says, and trains a kernel behind them."""

    def __init__(self, call, **options):
        super().__init__()
        self.table, self.dense = keras.layers.Embedding(ROWS, WIDTH, **options), keras.layers.Dense(WIDTH)
        self.table.build((None, 5))
        self.dense.build((None, 5, WIDTH))
        self.built, self._call = True, call

    def call(self, ids, training=None):
        return self._call(self, ids)


def once(model, ids):
    return tf.tanh(model.dense(model.table(ids)))


def twice(model, ids):
    """By tokens, by the first of them, and by positions, which are the same for all rows."""
    rows = model.table(ids) * model.table(ids[:, :1])
    return model.dense(tf.tanh(rows + model.table(tf.range(5))))


def pooled(model, ids):
    """Sums of the rows of several indices, and their mean: lines of which every row has the same gradient."""
    rows = model.table(ids)
    return model.dense(tf.tanh(tf.reduce_sum(rows, axis=1) + 2.0 * tf.reduce_mean(rows, axis=1)))


def tied(model, ids):
    return tf.matmul(tf.tanh(model.dense(model.table(ids))), model.table.embeddings.value, transpose_b=True)


def of_variable(model, ids):
    return model.dense(tf.nn.embedding_lookup(model.table.embeddings.value, tf.transpose(ids)))


def three_times(model, ids):
    """By tokens, by half of them, and by tokens that are computed."""
    return model.dense(model.table(ids)) + 0.1 * model.dense(model.table(ids[:, ::2]))[:, :1] * model.table(ids // 2)


def in_a_branch(model, ids):
    rows = tf.cond(tf.reduce_sum(ids) > 3, lambda: model.table(ids), lambda: 2.0 * model.table(ids[:, ::-1]))
    return tf.tanh(model.dense(rows))


def of_distinct(model, ids):
    ids, place = tf.unique(tf.reshape(ids, [-1]))
    return model.dense(tf.tanh(tf.gather(model.table(ids), place)))


def in_a_loop(model, ids):
    rounds = lambda n, total: (n + 1, total + model.table(ids))  # noqa: E731
    return model.dense(tf.while_loop(lambda n, _: n < 2, rounds, (0, model.table(ids)), maximum_iterations=2)[1])


def trained(call, optimizer=None, *, size=3, ids=IDS, steps=2, static=True, **options):
    model = LookedUp(call, **options)
    return Trained(model, [ids], size=size, optimizer=optimizer, least=50, static=static).train(steps)


def kinds_of(report):
    return [each.kind for each in report.entries]


def whole_tables(report):
    table = ROWS * WIDTH * 8
    return [each.kind for each in report.entries if (each.bytes or 0) >= table and "rows of" not in each.reason]


def adam(**options):
    return keras.optimizers.Adam(1e-2, **options)


@pytest.mark.parametrize("rows", [3, 7, 211])
@pytest.mark.parametrize("size", [2, 3])
def test_indices_are_sorted_by_the_ranks_whose_chunks_have_the_rows(rows, size):
    layout, indices = Layout((rows, 2), size), RNG.permutation(rows)
    ids, order, sent = (each.numpy() for each in row_order.by_owner(tf.constant(indices), layout))
    np.testing.assert_array_equal(ids, indices[order])
    for rank, mine in enumerate(np.split(ids, np.cumsum(sent)[:-1])):
        first, count = layout.rows_of(rank)
        own = [each for each in indices if first <= each < first + count]
        np.testing.assert_array_equal(mine, own)  # in their order


@pytest.mark.parametrize(
    ("call", "size", "static"),
    [(once, 3, True), (twice, 2, True), *(pytest.param(twice, 3, each, marks=LONG) for each in (True, False))],
)
def test_rows_are_looked_up_and_added_up_where_they_are(call, size, static):
    report = trained(call, size=size, static=static)
    if static:
        assert whole_tables(report) == [] and "gather" not in kinds_of(report), report.text()
        assert "all_to_all" in kinds_of(report) and "rows of tables of 6,752 bytes for GatherV2" in report.text()
    else:
        assert "all_to_all" not in kinds_of(report)  # the usual batch is larger than this table
        assert "for GatherV2, a table of fewer bytes than the rows" in report.text()


def test_rows_travel_once_although_adam_adds_up_their_squares_too():
    report = trained(once)
    assert kinds_of(report).count("all_to_all") == 3, report.text()  # indices, rows forward and backward


@pytest.mark.parametrize("static", [True, pytest.param(False, marks=LONG)])
@pytest.mark.parametrize("optimizer", [adam, pytest.param(lambda: keras.optimizers.SGD(0.1), marks=LONG)])
@pytest.mark.usefixtures("small_batches")
def test_a_gradient_that_lines_repeat_travels_once_to_each_owner(optimizer, static, sent_rows):
    trained(lambda model, ids: model.dense(tf.reduce_sum(model.table(ids), axis=1)), optimizer(), static=static, size=2)
    assert len(sent_rows) == 4  # rows forward and backward, of two ranks
    backward = [len(rows) for (_, name), rows in sorted(sent_rows.items())][1::2]
    for mine, count in zip(np.array_split(IDS, 2), backward):
        owners = [len({row >= 106 for row in line}) for line in mine]
        assert count == sum(owners) < mine.size


@LONG
@pytest.mark.parametrize("call", [pooled, tied, of_variable, in_a_branch, of_distinct, in_a_loop])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("small_batches")
def test_programs_with_tables_in_shards_equal_one_process(call, size):
    report = trained(call, size=size)
    assert call in (tied, in_a_loop) or whole_tables(report) == [], report.text()


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
    "clipped by norm": lambda: adam(clipnorm=0.1),
    "clipped by all norms": lambda: adam(global_clipnorm=0.1),
    "decayed, averaged": lambda: adam(weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulated": lambda: adam(gradient_accumulation_steps=2, global_clipnorm=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(adam(), initial_scale=64.0, dynamic_growth_steps=2),
}


@pytest.mark.parametrize("name", [each if each == "sgd" else pytest.param(each, marks=LONG) for each in OPTIMIZERS])
@pytest.mark.usefixtures("small_batches")
def test_optimizers_of_tables_in_shards_equal_one_process(name):
    report = trained(once, OPTIMIZERS[name](), steps=3)
    assert whole_tables(report) == [], report.text()
    assert name != "sgd" or kinds_of(report).count("all_to_all") == 3, report.text()


@pytest.mark.parametrize("name", [each if each == "sgd" else pytest.param(each, marks=LONG) for each in OPTIMIZERS])
@pytest.mark.usefixtures("small_batches")
def test_rows_of_several_look_ups_go_to_their_owners_alone(name):
    report = trained(three_times, OPTIMIZERS[name](), size=2, steps=3)
    # Some look up what they divide rows by at all their indices.
    divides = name in ("adagrad", "rmsprop")
    assert whole_tables(report) == [] and (divides or "gather" not in kinds_of(report)), report.text()


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_several_look_ups_are_added_up_in_the_order_of_one_process(size):
    """Numbers of which each order of additions gives another sum."""
    table, many = tf.Variable(np.zeros((ROWS, WIDTH))), RNG.integers(0, 3, (12, 2)).astype("int32")
    rows = RNG.normal(size=(12, 3, WIDTH)) * 10.0 ** RNG.integers(-8, 8, (12, 3, 1))

    def step(ids, rows):
        indices = tf.concat([flat(ids), tf.range(3, dtype=tf.int32), ids[:, 0]], 0)
        values = tf.concat([tf.reshape(rows[:, :2], [-1, WIDTH]), tf.ones([3, WIDTH], tf.float64), rows[:, 2]], 0)
        table.assign_sub(tf.convert_to_tensor(tf.IndexedSlices(0.5 * values, indices, tf.constant([ROWS, WIDTH]))))
        return tf.reduce_sum(ids)

    simulation = Simulation(step, [many, rows], size, variables=[table], sharded=[table], weights=[table.handle])
    report = simulation.check(many, rows, tolerance=0.0).reports[0]
    assert kinds_of(report) == ["all_to_all", "all_to_all", "sum"], report.text()
    assert np.abs(table).max() > 0


@LONG
@pytest.mark.parametrize("optimizer", [adam, OPTIMIZERS["sgd"]])
def test_ranks_without_rows_give_rows_of_tables(optimizer):
    trained(twice, optimizer(), ids=FEW)


@LONG
def test_a_regularized_table_is_looked_up_by_ids_of_other_types():
    trained(lambda model, ids: once(model, tf.cast(ids, tf.int64)), embeddings_regularizer=keras.regularizers.L2(0.1))


def looks_up(indices_of):
    table = tf.Variable(RNG.normal(size=(ROWS, WIDTH)))

    def step(ids):
        return tf.gather(table, indices_of(ids))

    return Simulation(step, [IDS], 2, variables=[table], sharded=[table], weights=[table.handle])


@pytest.mark.parametrize("wrong", [ROWS, -1])
@pytest.mark.parametrize("indices_of", [lambda ids: ids, lambda ids: tf.sort(ids, axis=0)], ids=["own", "all"])
def test_an_index_that_no_row_has_fails_as_in_one_process(indices_of, wrong):
    simulation, ids = looks_up(indices_of), IDS.copy()
    ids[0, 2] = wrong
    simulation.exchange._timeout = 1
    for call in (simulation.expected, simulation):
        with pytest.raises(Exception, match=rf"indices\[\d,2\] = {wrong} is not in \[0, "):
            call(ids)


def flat(ids):
    return tf.reshape(ids, [-1])


def lines(ids):
    return tf.repeat(tf.range(tf.shape(ids)[0]), tf.shape(ids)[1])


CALLS = {
    "gather_nd": lambda table, ids: tf.gather_nd(table, ids[..., tf.newaxis]),
    "negative": lambda table, ids: tf.gather(table, tf.where(ids > 9, ids, ids * 2), axis=-2),
    "segment_sum": lambda table, ids: tf.sparse.segment_sum(table, flat(ids), lines(ids)),
    "segment_mean": lambda table, ids: tf.sparse.segment_mean(table, flat(ids), lines(ids), num_segments=9),
    "segment_sqrt_n": lambda table, ids: tf.sparse.segment_sqrt_n(table, flat(ids), lines(ids)),
    "sparse": lambda table, ids: tf.nn.safe_embedding_lookup_sparse(table, tf.sparse.from_dense(ids), combiner="mean"),
    "columns": lambda table, ids: tf.gather(table, ids % WIDTH, axis=1),
    "batch_dims": lambda table, ids: tf.gather(table[: tf.shape(ids)[0]], ids % WIDTH, batch_dims=1),
}
GATHERED = ("columns", "batch_dims")  # the table is gathered whole


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=LONG)])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("small_batches")
def test_other_look_ups_are_built_where_the_rows_are(name, size):
    table = tf.Variable(RNG.normal(size=(ROWS, WIDTH)))

    def step(ids):
        with tf.GradientTape() as tape:
            rows = CALLS[name](table, ids)
            loss = tf.reduce_sum(tf.tanh(rows))
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss, rows

    simulation = Simulation(step, [IDS], size, variables=[table], sharded=[table], weights=[table.handle])
    report = simulation.check(IDS, steps=2).reports[0]
    assert bool(whole_tables(report)) == (name in GATHERED), report.text()


@pytest.mark.parametrize("kind", ["scatter_sub", "scatter_add", "scatter_update"])
def test_rows_of_repeated_ids_are_scattered_in_the_order_of_one_process(kind):
    table = tf.Variable(RNG.normal(size=(ROWS, WIDTH)))

    def step(ids):
        rows = tf.tanh(tf.gather(table, flat(ids))) * tf.cast(tf.range(tf.size(ids))[:, tf.newaxis], tf.float64)
        getattr(table, kind)(tf.IndexedSlices(rows, flat(ids)))
        return tf.reduce_sum(ids)

    assert len(np.unique(IDS)) < IDS.size
    simulation = Simulation(step, [IDS], 3, variables=[table], sharded=[table], weights=[table.handle])
    simulation.check(IDS, steps=2)


def test_rows_are_scattered_at_their_owners_with_mirrors_on_other_ranks():
    table = tf.Variable(RNG.normal(size=(ROWS, WIDTH)))

    def step(ids):
        table.scatter_sub(tf.IndexedSlices(tf.tanh(tf.gather(table, flat(ids))), flat(ids)))
        return tf.reduce_sum(ids)

    simulation = Simulation(step, [IDS], 3, variables=[table], sharded=[table], weights=[table.handle], mirrors=1)
    simulation.check(IDS, steps=2)
    for rank, held in enumerate(simulation.mirrors):
        np.testing.assert_array_equal(held[id(table.handle)].numpy(), simulation.held(table)[(rank - 1) % 3])
