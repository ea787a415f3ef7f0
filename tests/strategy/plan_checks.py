"""Planned sums: in the steady state no bucket asks rank 0. Run by test_strategy.py."""

import numpy as np

import keras_ddl
from keras_ddl import communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ops import translate_errors
from strategy.common import RANK, SIZE, keras, set_precision

set_precision("float32")

STEPS = 6
# Bytes of a kernel that no calling thread reduces itself (native/tf/collective_call.cc).
WIDTH = 160


def counted(model, x, y, batch_size=None):
    """Returns what a fit has counted, on this rank, that was not disturbed: where a rank comes seconds late, as on a
    busy machine, its step is the coordinator's, and some of the next ones are."""
    for _ in range(20):
        before = communicator.count()
        model.fit(x, y, batch_size=batch_size or len(x) // STEPS, epochs=1, verbose=0, shuffle=False)
        counts = {name: value - before[name] for name, value in communicator.count().items()}
        if not any(keras_ddl.all_gather_object(counts["fell_back"], name="test/fell_back")):
            break
    return counts


def check_buckets_of_a_steady_state_send_rank_0_nothing():
    """What is sent is what the unplanned collectives of a fit send, with five buckets as with one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * SIZE * 4, WIDTH)).astype(np.float32)
    y = x[:, :1]
    for bucket_bytes, least in ((1, 5), (1 << 30, 1)):
        with keras_ddl.Strategy(bucket_bytes=bucket_bytes).scope():
            layers = (keras.layers.Dense(WIDTH, use_bias=False) for _ in range(5))
            model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=len(x) // STEPS, epochs=1, verbose=0, shuffle=False)  # traces
        counts = counted(model, x, y)
        assert counts["fell_back"] == 0, counts
        assert counts["planned"] >= least * STEPS, counts
        if RANK > 0:  # one announcement and one decision for each of those that the coordinator decided
            assert counts["control_sent"] <= counts["coordinated"] + 1, counts


def check_a_steady_step_needs_nothing_from_rank_0():
    """Not even for the rows of its batch: a fit of more steps sends as many messages."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(STEPS * SIZE * 20, WIDTH)).astype(np.float32)
    with keras_ddl.Strategy().scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    more = STEPS * 4
    sent = []
    for steps in (STEPS, STEPS, STEPS + more):  # the first traces
        rows = x[: steps * SIZE * 4]
        counts = counted(model, rows, rows[:, :1], SIZE * 4)
        sent.append(counts["control_sent"])
    assert counts["fell_back"] == 0, counts
    assert counts["planned"] + counts["ran_inline"] >= 2 * (STEPS + more), counts  # rows and gradients
    assert sent[2] - sent[1] < more / 2, (sent, counts)
    keras_ddl.barrier()


def check_a_plan_of_batch_normalization_runs_as_planned():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS * SIZE * 4, WIDTH)).astype(np.float32)
    with keras_ddl.Strategy(bucket_bytes=1 << 16).scope():
        layers = [keras.layers.Dense(WIDTH), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile("adam", "mse", steps_per_execution=3)
    model.fit(x, x[:, :1], batch_size=len(x) // STEPS, epochs=1, verbose=0, shuffle=False)
    counts = counted(model, x, x[:, :1])
    assert counts["fell_back"] == 0, counts
    assert counts["planned"] + counts["ran_inline"] >= STEPS * 2, counts
    keras_ddl.barrier()


def check_a_bucket_of_another_plan_is_refused_on_all_ranks():
    """Ranks that trace other steps under one name: the first sum in which they differ says so."""
    from keras_ddl.cut.collectives import StepCollectives

    rows = 20_000 + RANK

    @tf.function
    def step():
        collectives = StepCollectives("plan_check", RANK, SIZE, None)
        first = collectives.reduce([tf.ones([20_000])], "sum", "sum_0")[0]
        second = collectives.reduce([tf.ones([rows])], "sum", "sum_1")[0]
        collectives.follow_plan()
        return first[0] + second[0]

    communicator.prepare_plans()
    try:
        with translate_errors():
            step()
    except keras_ddl.errors.RankMismatchError as error:
        message = str(error)
    else:
        raise AssertionError("nothing was found")
    assert "ranks disagree on 'plan_check/sum_1': number of elements: 20000 on rank(s) 0" in message, message
    keras_ddl.barrier()
