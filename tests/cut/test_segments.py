"""Rows of tables in shards that ragged and sparse ids look up: a rank has those of its rows of the batch."""

import keras
import numpy as np
import pytest
from cut.simulated import Simulation
from cut.test_gathered_weights import Trained
from cut.test_table_rows import (  # noqa: F401  (fixtures, too)
    IDS,
    OPTIMIZERS,
    RNG,
    ROWS,
    WIDTH,
    LookedUp,
    kinds_of,
    sent_rows,
    small_batches,
    whole_tables,
)

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.operations import segments

LENGTHS = np.array([2, 0, 5, 1, 0, 3, 0], "int32")  # lines without ids among others and at the end
LONG = pytest.mark.long


@pytest.fixture(autouse=True)
def drawn_from_a_seed(float64, small_batches):  # noqa: F811
    keras.utils.set_random_seed(3)


def ragged(ids, lengths):
    return tf.RaggedTensor.from_tensor(ids, lengths)


def sparse(ids, lengths):
    return ragged(ids, lengths).to_sparse()


class Pooled(LookedUp):
    def call(self, batch, training=None):
        return self.dense(tf.tanh(self._call(self.table, *batch)))


def summed(table, ids, lengths):
    return tf.reduce_sum(table(ragged(ids, lengths)), axis=1)


def averaged(table, ids, lengths):
    return tf.reduce_mean(table(ragged(ids, lengths + 1)) * 2.0, axis=1)


def largest(table, ids, lengths):
    """The largest entries of each line, which the gradient divides among equal ones."""
    return tf.reduce_max(table(ragged(ids, lengths + 1)), axis=1)


def by_sparse_ids(table, ids, lengths):
    return table(sparse(ids, lengths))


def combined(combiner, safe=True, weighted=False):
    """Combines rows by TensorFlow's functions for sparse ids."""

    def call(table, ids, lengths):
        look_up = tf.nn.safe_embedding_lookup_sparse if safe else tf.nn.embedding_lookup_sparse
        given, weights = sparse(ids, lengths), None
        if weighted:
            weights = given.with_values(tf.cast(given.values, tf.float64) / 100.0 + 0.5)
        return look_up(tf.convert_to_tensor(table.embeddings), given, weights, combiner=combiner)

    return call


def of_variable(table, ids, lengths):
    """TensorFlow looks up each id once in a variable."""
    given = sparse(ids, lengths)
    return tf.nn.safe_embedding_lookup_sparse(table.embeddings.value, given, combiner="sqrtn")


def of_two_features(table, ids, lengths):
    """Ids of two features with the same lines."""
    one = sparse(ids, lengths)
    other, weights = one.with_values(one.values // 2), one.with_values(tf.cast(one.values, tf.float64) / 100.0 + 0.5)
    given = tf.convert_to_tensor(table.embeddings)
    found = tf.nn.embedding_lookup_sparse(given, one, weights, combiner="sum")
    return found * tf.nn.embedding_lookup_sparse(given, other, weights, combiner="mean")


def of_other_weights(table, ids, lengths):
    """Weights of which only the sum of the weights says that they are as many as the ids."""
    weights = sparse(tf.cast(ids, tf.float64) / 100.0 + 0.5, lengths)
    return tf.nn.safe_embedding_lookup_sparse(tf.convert_to_tensor(table.embeddings), sparse(ids, lengths), weights)


def several(table, ids, lengths):
    """Ragged, sparse and dense ids of one table: the rows of their gradients are joined."""
    dense = tf.reduce_sum(table(ids), axis=1)
    return (
        summed(table, ids, lengths) + combined("mean")(table, ids // 2, lengths) * averaged(table, ids, lengths) + dense
    )


def by_operation(operation):
    """Combines the rows of each line by an operation itself; the table learns from their sums."""

    def call(table, ids, lengths):
        given = ragged(ids, lengths + 1)
        arguments = {"data": table(given).values, "segment_ids": given.value_rowids()}
        if operation.startswith("Unsorted"):
            arguments["num_segments"] = given.nrows()
        return tf.stop_gradient(getattr(tf.raw_ops, operation)(**arguments)) + summed(table, ids, lengths)

    return call


def trained(call, optimizer=None, *, size=3, ids=IDS, lengths=LENGTHS, steps=2, static=True):
    batch = [ids, lengths[: len(ids)]]
    return Trained(Pooled(call), batch, size=size, optimizer=optimizer, least=50, static=static).train(steps)


def assert_only_exchanged(report):
    """No rank receives rows of a table, or of its gradient, that it does not need."""
    of_ids = [each for each in report.entries if each.kind == "gather"]
    assert whole_tables(report) == [] and "all_gather" not in kinds_of(report), report.text()
    assert all(each.bytes and each.bytes <= 2 * IDS.nbytes for each in of_ids), report.text()
    assert "rows of tables of 6,752 bytes" in report.text(), report.text()


FUNCTIONS = {
    f"{combiner}{', safe' if safe else ''}{', weighted' if weighted else ''}": combined(combiner, safe, weighted)
    for combiner in ("sum", "mean", "sqrtn")
    for safe in (True, False)
    for weighted in (True, False)
}
SINGLE = (summed, averaged, largest, by_sparse_ids, of_variable, of_other_weights)
PROGRAMS = {each.__name__: each for each in (*SINGLE, of_two_features, several)}
FEW = ("summed", "by_sparse_ids", "mean, safe, weighted")
SOME = [each if each == "summed" else pytest.param(each, marks=LONG) for each in ("summed", "several", "mean, safe")]


@pytest.mark.parametrize(
    "name", [each if each in FEW else pytest.param(each, marks=LONG) for each in (*PROGRAMS, *FUNCTIONS)]
)
def test_rows_go_to_the_ranks_whose_lines_need_them(name):
    assert_only_exchanged(trained({**PROGRAMS, **FUNCTIONS}[name]))


@pytest.mark.parametrize("operation", segments.COMBINING)
def test_operations_combine_the_rows_of_lines(operation):
    trained(by_operation(operation), steps=1)


@pytest.mark.parametrize("name", ["summed", pytest.param("mean", marks=LONG)])
def test_only_needed_rows_are_sent_and_a_line_s_gradient_once_to_each_owner(name, sent_rows):  # noqa: F811
    trained({**PROGRAMS, **FUNCTIONS}[name], size=2, steps=1)
    lines = [set(ids[:length]) for ids, length in zip(IDS, LENGTHS)]
    halves = lines[:4], lines[4:]
    owner = lambda row: int(row >= 106)  # noqa: E731
    assert len(sent_rows) == 4  # rows forward and backward, of two ranks
    counts = [[len(rows) for (rank, _), rows in sorted(sent_rows.items()) if rank == each] for each in range(2)]
    needed = [set().union(*some) for some in halves]
    assert [ahead for ahead, _ in counts] == [sum(owner(row) == n for some in needed for row in some) for n in range(2)]
    assert [back for _, back in counts] == [sum(len(set(map(owner, line))) for line in some) for some in halves]


@LONG
@pytest.mark.parametrize("name", [*PROGRAMS, "mean, safe", "mean, safe, weighted", "sum"])
def test_the_number_of_lines_may_be_open(name):
    report = trained({**PROGRAMS, **FUNCTIONS}[name], static=False, size=2)
    assert "rows of tables of 6,752 bytes" in report.text() and "all_gather" not in kinds_of(report), report.text()


@pytest.mark.parametrize("call", [FUNCTIONS["mean"], pytest.param(several, marks=LONG)])
def test_a_rank_may_have_no_lines_and_lines_no_ids(call):
    trained(call, ids=IDS[:2], lengths=LENGTHS[:2])
    trained(call, ids=IDS[:2], lengths=np.zeros(2, "int32"), steps=1)


@pytest.mark.parametrize("name", [each if each == "sgd" else pytest.param(each, marks=LONG) for each in OPTIMIZERS])
@pytest.mark.parametrize("program", SOME)
def test_optimizers_equal_one_process(name, program):
    report = trained({**PROGRAMS, **FUNCTIONS}[program], OPTIMIZERS[name](), steps=3, size=2)
    assert whole_tables(report) == [], report.text()
    divides = name in ("adagrad", "rmsprop")  # by what they look up at all indices of several look-ups
    assert divides or "all_gather" not in kinds_of(report), report.text()


def looked_up(combine, *batch, size=2):
    table = tf.Variable(RNG.normal(size=(ROWS, WIDTH)))

    def step(*batch):
        with tf.GradientTape() as tape:
            rows = combine(table, *batch)
            loss = tf.reduce_sum(tf.tanh(rows))
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss, rows

    return Simulation(step, batch, size, variables=[table], sharded=[table], weights=[table.handle])


def of_ragged(table, ids, lengths):
    return tf.reduce_sum(tf.gather(table, ragged(ids, lengths)), axis=1)


def of_sparse(table, ids, lengths):
    return tf.nn.embedding_lookup_sparse(tf.convert_to_tensor(table), sparse(ids, lengths), None, combiner="sum")


@pytest.mark.parametrize("wrong", [ROWS, -1])
@pytest.mark.parametrize("combine", [of_ragged, of_sparse])
def test_an_id_that_no_row_has_fails_on_all_ranks(combine, wrong):
    simulation, ids = looked_up(combine, IDS, LENGTHS), IDS.copy()
    ids[0, 1] = wrong
    simulation.exchange._timeout = 1
    for call in (simulation.expected, simulation):
        with pytest.raises(Exception, match=rf"indices\[1\] ?==? {wrong} (is not in|out of range) \[0, "):
            call(ids, LENGTHS)


def by(reduce):
    """Combines rows of each line's first two ids by segment ids that are data."""
    return lambda table, ids, lines: reduce(tf.gather(table, tf.unique(tf.reshape(ids[:, :2], [-1])).y[:9]), lines[:9])


def test_segment_ids_in_any_order_are_added_up_as_in_one_process():
    add_up = by(lambda rows, lines: tf.math.unsorted_segment_sum(rows, lines, 7))
    lines = np.array([3, 1, 0, 6, 2, 2, 5, 0, 1, 4], "int32")
    looked_up(add_up, IDS, lines).check(IDS, lines, steps=2)


def test_segment_ids_that_decrease_fail_on_all_ranks():
    simulation = looked_up(by(tf.math.segment_sum), IDS, np.arange(10, dtype="int32"))
    simulation.check(IDS, np.array([0, 0, 1, 3, 3, 4, 4, 4, 6, 6], "int32"))
    simulation.exchange._timeout = 1
    for call in (simulation.expected, simulation):
        with pytest.raises(Exception, match="not increasing|decrease"):
            call(IDS, np.array([0, 0, 1, 3, 3, 2, 4, 4, 6, 6], "int32"))
