"""Horovod's names of collectives and compression, as its documentation uses them. See name_checks.py."""

import warnings

import numpy as np
import pytest

import keras_ddl.horovod as hvd
from harness.name_tables import BETTER, WORKS, row
from keras_ddl.compat.tensorflow import tf
from keras_ddl.horovod import compression

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def assert_same(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-6)


@row(
    "allreduce", BETTER, "if ranks disagree, all get the error and the next call works; IndexedSlices take factors, too"
)
@row("allreduce(average)", WORKS, "with a warning: use `op`")
def check_name_allreduce():
    x = tf.constant([[1.0, -2.0]]) * (RANK + 1)
    total = SIZE * (SIZE + 1) / 2
    mean = hvd.allreduce(
        x, device_dense="/cpu:0", device_sparse="/cpu:0", compression=hvd.Compression.fp16, prescale_factor=2.0,
        postscale_factor=0.5, name="x", process_set=hvd.global_process_set, ignore_name_scope=True,
    )  # fmt: skip
    assert_same(mean, [[total / SIZE, -2 * total / SIZE]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(hvd.allreduce(x, average=False), [[total, -2 * total]])
    assert [each.category for each in caught] == [DeprecationWarning]
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([RANK]), tf.constant([SIZE, 2]))
    found = hvd.allreduce(slices, op=hvd.Sum, postscale_factor=3.0)
    assert isinstance(found, tf.IndexedSlices)
    assert_same(tf.convert_to_tensor(found), np.full([SIZE, 2], 3.0))


@row("grouped_allreduce", WORKS, "also mixes IndexedSlices, tensors and dtypes")
def check_name_grouped_allreduce():
    tensors = [tf.ones([2]), tf.constant([[RANK]])]
    arguments = {"device_dense": "", "device_sparse": "", "prescale_factor": 1.0, "postscale_factor": 1.0}
    found = hvd.grouped_allreduce(
        tensors, op=hvd.Sum, compression=hvd.Compression.none, process_set=hvd.global_process_set, name="group",
        ignore_name_scope=True, **arguments,
    )  # fmt: skip
    assert_same(found[0], [SIZE, SIZE])
    assert_same(found[1], [[SIZE * (SIZE - 1) / 2]])


@row(
    "allgather",
    BETTER,
    "gradients are those of the sum of all losses; Horovod divides them by the number of ranks",
)
@row("grouped_allgather", WORKS, "one by one")
def check_name_allgather():
    x = tf.fill([RANK + 1, 2], float(RANK))
    expected = np.concatenate([np.full([rank + 1, 2], rank) for rank in range(SIZE)])
    more = {"name": "rows", "ignore_name_scope": True, "process_set": hvd.global_process_set}
    assert_same(hvd.allgather(x, **more), expected)
    first, second = hvd.grouped_allgather([x, 2 * x], **more)
    assert_same(first, expected)
    assert_same(second, 2 * expected)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(hvd.allgather(x))
    assert_same(tape.gradient(loss, x), np.full([RANK + 1, 2], SIZE))


@row("broadcast", WORKS)
@row("broadcast_", WORKS)
@row("broadcast_variables", WORKS)
def check_name_broadcast():
    more = {"name": "sent", "process_set": hvd.global_process_set}
    for root in (SIZE - 1, np.int64(SIZE - 1)):
        sent = hvd.broadcast(tf.fill([2], RANK), root_rank=root, ignore_name_scope=True, **more)
        assert_same(sent, [SIZE - 1] * 2)
    variables = [tf.Variable([1.0 * RANK]), tf.Variable(RANK)]
    held = hvd.broadcast_(variables, root_rank=SIZE - 1, **more)
    assert [float(each[0]) if each.shape.rank else int(each) for each in held] == [SIZE - 1] * 2
    variables[0].assign([RANK + 5.0])
    hvd.broadcast_variables(variables, root_rank=0, process_set=hvd.global_process_set, inplace=True)
    assert float(variables[0][0]) == 5 and int(variables[1]) == SIZE - 1


@row(
    "reducescatter",
    BETTER,
    "gradients are those of the sum of all losses; Horovod multiplies them by the number of ranks",
)
@row("grouped_reducescatter", WORKS, "one by one")
def check_name_reducescatter():
    x = tf.reshape(tf.range(2.0 * SIZE + 2), [SIZE + 1, 2])  # the first rank has one row more
    rows = slice(0, 2) if RANK == 0 else slice(RANK + 1, RANK + 2)
    more = {"device_dense": "", "compression": hvd.Compression.bf16, "process_set": hvd.global_process_set}
    factors = {"prescale_factor": 2.0, "postscale_factor": 0.5}
    found = hvd.reducescatter(x, op=hvd.Sum, name="scattered", ignore_name_scope=True, **more, **factors)
    assert_same(found, SIZE * x.numpy()[rows])
    assert_same(hvd.grouped_reducescatter([x, -x], **more, **factors)[1], -x.numpy()[rows])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(hvd.reducescatter(x, op=hvd.Sum))
    assert_same(tape.gradient(loss, x), np.ones([SIZE + 1, 2]))


@row("alltoall", WORKS)
def check_name_alltoall():
    x = tf.range(SIZE * (SIZE + 1) // 2)
    splits = list(range(1, SIZE + 1))
    found, received = hvd.alltoall(x, splits=splits, name="to", ignore_name_scope=True)
    begin = RANK * (RANK + 1) // 2
    assert_same(found, np.tile(np.arange(begin, begin + RANK + 1), SIZE))
    assert_same(received, [RANK + 1] * SIZE)
    assert_same(hvd.alltoall(tf.fill([SIZE], RANK), process_set=hvd.global_process_set), np.arange(SIZE))


@row("broadcast_object", WORKS)
@row("broadcast_object_fn", WORKS)
@row("allgather_object", WORKS)
def check_name_broadcast_object():
    more = {"session": None, "process_set": hvd.global_process_set}
    value = {"epoch": RANK, "names": ["a"] * RANK}
    assert hvd.broadcast_object(value, root_rank=SIZE - 1, name="state", **more)["epoch"] == SIZE - 1
    send = hvd.broadcast_object_fn(root_rank=0, name="resume", **more)
    assert send(value) == {"epoch": 0, "names": []} and send(RANK) == 0
    assert hvd.allgather_object(value, name="all", **more)[-1]["names"] == ["a"] * (SIZE - 1)


@row(
    "join",
    BETTER,
    "allgather, reducescatter, IndexedSlices and broadcasts of other ranks still work; alltoall, Adasum and "
    "objects fail and name the joined ranks, which do not count in Min, Max and Product (zeros in Horovod)",
)
def check_name_join():
    if RANK == 0:
        assert hvd.join() == SIZE - 1
    else:
        assert_same(hvd.allreduce(tf.constant([4.0]), op=hvd.Min), [4.0])
        assert_same(hvd.allreduce(tf.constant([4.0])), [4.0 * (SIZE - 1) / SIZE])
        assert hvd.allgather(tf.constant([RANK])).shape == [SIZE - 1]
        with pytest.raises(tf.errors.FailedPreconditionError, match="have joined"):
            hvd.allgather_object(RANK)
        hvd.join()
    assert hvd.allgather_object(RANK) == list(range(SIZE))


# ---- compression -----------------------------------------------------------------------------------------------------


@row("Compression", BETTER, "also `bf16`, with the range of float32")
@row("Compression.none", WORKS)
@row("Compression.fp16", WORKS, "16 bits travel; integers unchanged")
def check_name_Compression():
    fine = tf.constant([1 + 2.0**-12])
    assert_same(hvd.allreduce(fine, compression=hvd.Compression.none), [1 + 2.0**-12])
    assert float(hvd.allreduce(fine, compression=hvd.Compression.fp16)[0]) == 1
    assert float(hvd.allreduce(tf.constant([2.0**100]), compression=hvd.Compression.bf16)[0]) == 2.0**100


@row("compression.Compressor", BETTER, "derive from it; a method left out changes nothing")
@row("compression.Compressor.compress", BETTER, "Horovod's returns nothing")
@row("compression.Compressor.decompress", BETTER, "Horovod's returns nothing")
@row("compression.NoneCompressor", WORKS)
@row("compression.NoneCompressor.compress", WORKS)
@row("compression.NoneCompressor.decompress", WORKS)
@row("compression.FP16Compressor", WORKS)
@row("compression.FP16Compressor.compress", WORKS)
@row("compression.FP16Compressor.decompress", WORKS)
def check_name_Compressor():
    class Quarter(compression.Compressor):
        @staticmethod
        def compress(tensor):
            return tensor / 4, 4.0

    x = tf.constant([1.0, 3.0])
    assert_same(hvd.allreduce(x, compression=Quarter), [0.25, 0.75])
    for kind in (compression.Compressor, compression.NoneCompressor):
        wire, context = kind.compress(tensor=x)
        assert wire is x and kind.decompress(tensor=wire, ctx=context) is x
    wire, context = compression.FP16Compressor.compress(x)
    assert wire.dtype == tf.float16
    assert compression.FP16Compressor.decompress(wire, ctx=context).dtype == tf.float32
