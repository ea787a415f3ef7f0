"""Process sets, and calls that differ between ranks. Run by test_horovod.py."""

import numpy as np

import keras_ddl.horovod as hvd
from harness.rank_program import skip
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LAST = RANK == SIZE - 1


def expect(error: type[BaseException], function, *words: str) -> None:
    try:
        function()
    except error as caught:
        assert all(word in str(caught) for word in words), (words, str(caught))
    else:
        raise AssertionError(f"rank {RANK}: no {error.__name__}")
    np.testing.assert_array_equal(hvd.allreduce(tf.ones([3]), op=hvd.Sum), np.full(3, SIZE))


def check_horovod_disagreement_is_failed_precondition_on_every_rank():
    if SIZE == 1:
        skip("one rank agrees with itself")
    wrong = {
        "shape": lambda: hvd.allreduce(tf.ones([3 if LAST else 2]), name="loss"),
        "average": lambda: hvd.allreduce(tf.ones([2]), op=hvd.Average if LAST else hvd.Sum, name="loss"),
        "kind": lambda: (hvd.allgather if LAST else hvd.allreduce)(tf.ones([2]), name="loss"),
        "root": lambda: hvd.broadcast(tf.ones([2]), root_rank=1 if LAST else 0, name="loss"),
        "rows": lambda: hvd.allgather(tf.ones([2, 3 if LAST else 2]), name="loss"),
        "scatter": lambda: hvd.reducescatter(tf.ones([2, 3 if LAST else 2]), name="loss"),
        "alltoall": lambda: hvd.alltoall(tf.ones([SIZE, 3 if LAST else 2]), name="loss"),
        "adasum": lambda: hvd.allreduce(tf.ones([2]), op=hvd.Adasum if LAST else hvd.Sum, name="loss"),
        "dtype in a group": lambda: hvd.grouped_allreduce(
            [tf.ones([2]), tf.ones([2], tf.int32 if LAST else tf.float32)], name="loss"
        ),
        "group": lambda: hvd.grouped_allreduce([tf.ones([2])] * (3 if LAST else 2), name="loss"),
    }
    for what, function in wrong.items():
        print(what, flush=True)
        expect(tf.errors.FailedPreconditionError, function, "loss", f"{SIZE - 1}")
        if what != "kind":
            expect(tf.errors.FailedPreconditionError, tf.function(function), "loss", f"{SIZE - 1}")
    unnamed = tf.function(lambda: hvd.allreduce(tf.ones([2]), op=hvd.Adasum if LAST else hvd.Sum))
    expect(tf.errors.FailedPreconditionError, unnamed, "all_reduce")
    expect(
        tf.errors.FailedPreconditionError,
        lambda: hvd.broadcast_variables([tf.Variable(tf.ones([3 if LAST else 2]))], 0),
        "variable 0",
    )
    for fits_not in (
        lambda: hvd.alltoall(tf.ones([SIZE + LAST])),
        lambda: hvd.alltoall(tf.ones([SIZE]), splits=[1] * (SIZE - 1) + [2 if LAST else 1]),
    ):
        expect(tf.errors.InvalidArgumentError, fits_not, "multiple", f"rank {SIZE - 1}")
        expect(ValueError, fits_not, "multiple")
    for malformed in ([1] * (SIZE + 1), [1.0] * SIZE):
        for error in (tf.errors.InvalidArgumentError, ConfigError):
            expect(error, lambda splits=malformed: hvd.alltoall(tf.ones([SIZE]), splits=splits), "integers")
    expect(tf.errors.FailedPreconditionError, lambda: hvd.broadcast_object(1, 1 if LAST else 0, name="o"), "root")
    expect(ValueError, lambda: hvd.broadcast(tf.ones([2]), SIZE), "root_rank")


def check_horovod_process_sets():
    everybody = hvd.global_process_set
    assert (everybody.process_set_id, everybody.ranks, everybody.size()) == (0, list(range(SIZE)), SIZE)
    assert everybody.rank() == RANK
    assert everybody.included()
    assert not hvd.remove_process_set(everybody)
    if SIZE == 1:
        skip("its only set is that of all ranks")
    late = hvd.ProcessSet([SIZE - 1])
    expect(ValueError, late.size, "add_process_set")
    hvd.init(process_sets=[late])
    early = hvd.add_process_set(range(SIZE - 1))
    mine = late if LAST else early
    members = mine.ranks
    assert early.ranks == list(range(SIZE - 1))
    assert (mine.size(), mine.rank(), mine.included()) == (len(members), members.index(RANK), True)
    assert int(hvd.size_op(early.process_set_id)) == SIZE - 1
    assert int(hvd.process_set_included_op(late.process_set_id)) == LAST
    other = early if LAST else late
    assert not other.included()
    for error in (ConfigError, tf.errors.InvalidArgumentError):
        expect(error, lambda: hvd.allreduce(tf.ones([2]), process_set=other), "included")
    x = tf.fill([len(members), 2], RANK + 1.0)
    total = sum(rank + 1.0 for rank in members)
    for function in (lambda f, *args, **kwargs: f(*args, **kwargs), tf.function(lambda f, *a, **k: f(*a, **k))):
        reduced = function(hvd.allreduce, x, op=hvd.Sum, process_set=mine)
        np.testing.assert_array_equal(reduced, np.full(x.shape, total))
        gathered = function(hvd.allgather, tf.fill([1], RANK), process_set=mine)
        np.testing.assert_array_equal(gathered, members)
        # A root is numbered among all ranks.
        sent = function(hvd.broadcast, tf.fill([2], RANK), members[-1], process_set=mine)
        np.testing.assert_array_equal(sent, [members[-1]] * 2)
        scattered = function(hvd.reducescatter, x, op=hvd.Sum, process_set=mine)
        np.testing.assert_array_equal(scattered, [[total] * 2])
        np.testing.assert_array_equal(function(hvd.alltoall, x, process_set=mine)[:, 0], [r + 1.0 for r in members])
    (grouped,) = hvd.grouped_allreduce([x], op=hvd.Max, process_set=mine)
    np.testing.assert_array_equal(grouped, np.full(x.shape, members[-1] + 1))
    assert hvd.allgather_object(RANK, process_set=mine) == members
    assert hvd.broadcast_object(RANK, members[-1], process_set=mine) == members[-1]
    variable = tf.Variable(RANK)
    hvd.broadcast_variables([variable], members[0], process_set=mine)
    assert variable.numpy() == members[0]
    expect(ValueError, lambda: hvd.broadcast(tf.ones([2]), other.ranks[0], process_set=mine), "root_rank")
    expect(ValueError, lambda: hvd.add_process_set([SIZE - 1]), "once")
    expect(ValueError, lambda: hvd.add_process_set([SIZE]), f"{SIZE}")
    expect(tf.errors.FailedPreconditionError, lambda: hvd.add_process_set([0] if LAST else range(SIZE)), f"{SIZE - 1}")
    assert hvd.remove_process_set(early)
    assert hvd.remove_process_set(late)
    assert late.process_set_id is late.ranks is None
    expect(ValueError, late.size, "registered")
    again = hvd.add_process_set([SIZE - 1])
    assert again.process_set_id == 3
    hvd.remove_process_set(again)


def check_horovod_shutdown_and_init_again():
    kept = hvd.add_process_set([0]) if SIZE > 1 else None
    hvd.shutdown()
    assert not hvd.is_initialized()
    expect_closed = (hvd.rank, lambda: hvd.allreduce(tf.ones([2])))
    for function in expect_closed:
        try:
            function()
        except RuntimeError as error:
            assert "init" in str(error)
        else:
            raise AssertionError("no error")
    hvd.init()
    assert kept is None or kept.process_set_id is None
    np.testing.assert_array_equal(hvd.allreduce(tf.ones([3]), op=hvd.Sum), np.full(3, SIZE))
