"""Every public name of horovod.tensorflow, as Horovod's documentation uses it. Run by test_horovod.py.

docs/appendix/horovod-names.md is made of these rows (tests/harness/name_tables.py); train_name_checks.py has those of
optimizers, tapes, layers and Keras.
"""

import inspect
import json
import tempfile
import warnings
from pathlib import Path

import numpy as np

import keras_ddl.horovod as hvd
from harness.name_tables import BETTER, HOROVOD, REFUSED, WORKS, row
from keras_ddl.compat.tensorflow import tf
from keras_ddl.horovod import compression
from keras_ddl.horovod import keras as hvd_keras

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def assert_same(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-6)


def refuses(call, *words, error=ValueError):
    """`call` raises, and the message has what is to be read in it."""
    try:
        call()
    except error as caught:
        assert all(word in str(caught) for word in words), caught
    else:
        raise AssertionError(f"no {error.__name__}")


def ours(name):
    """What keras_ddl has for a name of HOROVOD.names()."""
    places = {"horovod": hvd, "compression": compression, "keras": hvd_keras, "callbacks": hvd_keras.callbacks}
    first, _, rest = name.partition(".")
    value = places.get(first, hvd)
    for part in (rest if first in places else name).split("."):
        value = getattr(value, part)
    return value


# ---- what all rows promise -------------------------------------------------------------------------------------------


def check_names_take_horovods_parameters_in_horovods_order():
    listed = [
        (HOROVOD.sections[key].prefix + name, parameters)
        for key, names in HOROVOD.lists().items()
        for name, parameters in names.items()
        if isinstance(parameters, list)
    ]
    elsewhere = {}  # by name: parameters that stand at another place here
    for name, parameters in listed:
        found = HOROVOD.row_of(name)
        # What an optimizer and a tape have is of objects: their checks call it with these parameters.
        if not parameters or found is None or found.verdict == REFUSED or "Distributed" in name.rpartition(".")[0]:
            continue
        takes = inspect.signature(ours(name)).parameters
        any_more = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        passed_on = any(each.kind is each.VAR_POSITIONAL for each in takes.values())
        place = [
            each.name for each in takes.values() if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"
        ]
        for number, parameter in enumerate(parameters):
            assert parameter in takes or any_more, f"{name} does not take {parameter}"
            if place[number : number + 1] != [parameter] and not passed_on:
                elsewhere.setdefault(name, {})[parameter] = None
        if not passed_on:
            assert set(found.by_keyword) >= set(elsewhere.get(name, ())), (name, elsewhere[name], place)
    for name, found in elsewhere.items():
        assert set(HOROVOD.row_of(name).by_keyword) == set(found), (
            f"{name}: by keyword, says its row, and it is {found}"
        )


def check_names_of_one_module_are_those_of_the_other():
    for module, names in HOROVOD.lists().items():
        here = {"horovod.tensorflow.compression": compression}.get(module, hvd_keras)
        for name, origin in names.items():
            if not isinstance(origin, str) or any(each in f"{module}.{origin}" for each in ("elastic", "is_version")):
                continue
            owner, _, last = origin.rpartition(".")
            if "." in name:  # what a class inherits from another
                assert ours(HOROVOD.sections[module].prefix + name) is not None
                continue
            if f"{owner}.{last}" in HOROVOD.sections:  # a module
                assert inspect.ismodule(getattr(here, name)), origin
            else:
                assert getattr(here, name) is getattr(hvd, last), f"{module}.{name}"


def check_names_that_are_not_yet_are_not_there():
    for name in filter(HOROVOD.is_not_yet, HOROVOD.names()):
        refuses(lambda name=name: ours(name), error=AttributeError)


# ---- the job ---------------------------------------------------------------------------------------------------------


@row("init", WORKS, "again, it changes nothing. Gives TensorFlow the rank's share of the cores")
@row("init(comm)", WORKS, "all ranks: None, a list, or a communicator of MPI. Some of them: refused, use process sets")
@row("init(process_sets)", BETTER, '"dynamic" is not needed: sets may be added at any time')
@row("is_initialized", WORKS)
@row("shutdown", WORKS, "and `init` may come after it")
def check_name_init():
    from mpi4py import MPI

    mine = hvd.ProcessSet([SIZE - 1])
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init(comm=list(range(SIZE)), process_sets=[mine])
    assert hvd.is_initialized() and mine.process_set_id == 1
    hvd.init(comm=MPI.COMM_WORLD, process_sets="dynamic")
    refuses(lambda: hvd.init(comm=MPI.COMM_SELF), "process_sets")
    refuses(lambda: hvd.init(comm=[0]), "process_sets")
    hvd.remove_process_set(mine)


@row("rank", WORKS, "before `init` NotInitializedError, as of all of these; Horovod's is a ValueError")
@row("size", WORKS)
@row("local_rank", WORKS)
@row("local_size", WORKS)
@row("cross_rank", WORKS, "among the hosts that have a rank of this `local_rank`")
@row("cross_size", WORKS)
@row("is_homogeneous", WORKS)
def check_name_rank():
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous() is True


@row("rank_op", WORKS, "a constant: these do not change while a job runs")
@row("size_op", WORKS, "as `rank_op`")
@row("local_rank_op", WORKS, "as `rank_op`")
@row("local_size_op", WORKS, "as `rank_op`")
@row("process_set_included_op", BETTER, "a set that there is not is an error, not a negative number")
def check_name_rank_op():
    @tf.function
    def numbers():
        return hvd.rank_op(name="r"), hvd.size_op(0, name="s"), hvd.local_rank_op(name="l"), hvd.local_size_op(name="m")

    assert [int(each) for each in numbers()] == [RANK, SIZE, RANK, SIZE]
    assert all(each.dtype == tf.int32 for each in numbers())
    assert int(hvd.process_set_included_op(process_set_id=0, name="i")) == 1
    refuses(lambda: hvd.process_set_included_op(77), "77")


@row("mpi_built", WORKS, "whether keras_ddl's library for MPI is there")
@row("mpi_enabled", WORKS, "False for a rank that runs alone")
@row("mpi_threads_supported", WORKS)
def check_name_mpi_built():
    assert hvd.mpi_built() is True
    assert hvd.mpi_enabled() is hvd.mpi_threads_supported() is True


@row("gloo_built", WORKS, "False, as of the libraries below: keras_ddl uses none of them")
@row("gloo_enabled", WORKS, "False")
@row("nccl_built", WORKS, "0: tensors of a GPU pass through the host's memory")
@row("ddl_built", WORKS, "False: it asks for IBM's library")
@row("ccl_built", WORKS, "False")
@row("cuda_built", WORKS, "False, whatever TensorFlow computes with")
@row("rocm_built", WORKS, "False")
def check_name_gloo_built():
    assert hvd.gloo_built() is hvd.gloo_enabled() is hvd.ddl_built() is hvd.ccl_built() is False
    assert hvd.cuda_built() is hvd.rocm_built() is False
    assert hvd.nccl_built() == 0


@row("start_timeline", BETTER, "[a file for each rank](../timeline.md); `HOROVOD_TIMELINE=DYNAMIC` is not needed")
@row("start_timeline(mark_cycles)", REFUSED, "there are no cycles")
@row("stop_timeline", WORKS)
def check_name_start_timeline():
    with tempfile.TemporaryDirectory() as folder:
        hvd.start_timeline(f"{folder}/timeline.json")
        hvd.allreduce(tf.ones([2]), name="seen")
        hvd.stop_timeline()
        (written,) = Path(folder).iterdir()
        assert "seen" in written.read_text() and json.loads(written.read_text())
    refuses(lambda: hvd.start_timeline("timeline.json", mark_cycles=True), "cycles")


# ---- operations and process sets -------------------------------------------------------------------------------------


@row("Average", BETTER, "made in the collective: no overflow of float16 inside a host; of integers, toward zero")
@row("Sum", WORKS)
@row("Min", WORKS, "its gradient goes to the rank with the smallest value")
@row("Max", WORKS, "its gradient goes to the rank with the largest value")
@row("Product", WORKS, "its gradient is that of a product")
@row(
    "Adasum",
    BETTER,
    "[any number of ranks](../collectives.md#adaptive-sums-opadasum), and in process sets; not for the optimizer",
)
def check_name_Average():
    x = tf.constant([RANK + 1.0, 2.0])
    parts = np.array([[rank + 1.0, 2.0] for rank in range(SIZE)])
    for op, expected in ((hvd.Average, np.mean), (hvd.Sum, np.sum), (hvd.Min, np.min), (hvd.Max, np.max)):
        assert_same(hvd.allreduce(x, op=op), expected(parts, axis=0))
    assert_same(hvd.allreduce(x, op=hvd.Product), np.prod(parts, axis=0))
    assert_same(hvd.allreduce(tf.one_hot(RANK, SIZE), op=hvd.Adasum), np.ones(SIZE))


@row("ProcessSet", WORKS)
@row("ProcessSet(ranks_or_comm)", REFUSED, "a communicator of MPI: list its ranks")
@row("ProcessSet.process_set_id", WORKS, "0 for all ranks, None while not registered")
@row("ProcessSet.ranks", WORKS)
@row("ProcessSet.mpi_comm", WORKS, "always None")
@row("ProcessSet.size", BETTER, "of a set that is not registered: an error that says so, not None")
@row("ProcessSet.rank", BETTER, "as `size`")
@row("ProcessSet.included", BETTER, "as `size`")
@row("add_process_set", BETTER, "without `HOROVOD_DYNAMIC_PROCESS_SETS`; ranks that add different sets are told")
@row("remove_process_set", WORKS)
def check_name_ProcessSet():
    from mpi4py import MPI

    one = hvd.ProcessSet(ranks_or_comm=[SIZE - 1])
    for ask in (one.size, one.rank, one.included):
        refuses(ask, "add_process_set")
    assert one.process_set_id is None and one.mpi_comm is None
    assert hvd.add_process_set(one) is one and one.process_set_id > 0
    assert one.ranks == [SIZE - 1] and one.size() == 1 and one.included() == (SIZE - 1 == RANK)
    if one.included():
        assert one.rank() == 0
        assert_same(hvd.allreduce(tf.ones([2]), op=hvd.Sum, process_set=one), [1, 1])
    assert hvd.remove_process_set(one) and not hvd.remove_process_set(one)
    refuses(lambda: hvd.ProcessSet(MPI.COMM_WORLD), "list the ranks")


@row("global_process_set", WORKS)
def check_name_global_process_set():
    everybody = hvd.global_process_set
    assert (everybody.process_set_id, everybody.ranks, everybody.rank()) == (0, list(range(SIZE)), RANK)
    assert_same(hvd.allreduce(tf.ones([2]), op=hvd.Sum, process_set=everybody), [SIZE] * 2)
    assert not hvd.remove_process_set(everybody)


# ---- collectives -----------------------------------------------------------------------------------------------------


@row("allreduce", BETTER, "ranks that disagree are all told, and the next call works; with IndexedSlices factors, too")
@row("allreduce(average)", WORKS, "with a warning: it is the old form of `op`")
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


@row("grouped_allreduce", WORKS, "also of IndexedSlices beside tensors, and of different dtypes")
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
    "gradients are those of the sum of all ranks' losses: Horovod's are divided by the number of ranks",
)
@row("grouped_allgather", WORKS, "the gathers run one by one")
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
@row("broadcast_", WORKS, "one variable, or a list")
@row("broadcast_variables", WORKS, "always in place")
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
    "gradients are those of the sum of all ranks' losses: Horovod's are multiplied by the number of ranks",
)
@row("grouped_reducescatter", WORKS, "they run one by one")
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


@row("alltoall", WORKS, "with `splits` also how many rows came from each rank")
def check_name_alltoall():
    x = tf.range(SIZE * (SIZE + 1) // 2)
    splits = list(range(1, SIZE + 1))
    found, received = hvd.alltoall(x, splits=splits, name="to", ignore_name_scope=True)
    begin = RANK * (RANK + 1) // 2
    assert_same(found, np.tile(np.arange(begin, begin + RANK + 1), SIZE))
    assert_same(received, [RANK + 1] * SIZE)
    assert_same(hvd.alltoall(tf.fill([SIZE], RANK), process_set=hvd.global_process_set), np.arange(SIZE))


@row("broadcast_object", WORKS, "needs no session")
@row("broadcast_object_fn", WORKS, "needs no session, nor graph mode")
@row("allgather_object", WORKS, "needs no session")
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
    "allgather, reducescatter, IndexedSlices and broadcast from the others go on, too; what needs all ranks (alltoall, "
    "Adasum, objects) fails with an error that names who has joined; who has does not count in Min, Max and Product: "
    "Horovod's give zeros",
)
def check_name_join():
    if RANK == 0:
        assert hvd.join() == SIZE - 1
    else:
        assert_same(hvd.allreduce(tf.constant([4.0]), op=hvd.Min), [4.0])
        assert_same(hvd.allreduce(tf.constant([4.0])), [4.0 * (SIZE - 1) / SIZE])
        assert hvd.allgather(tf.constant([RANK])).shape == [SIZE - 1]
        refuses(lambda: hvd.allgather_object(RANK), "have joined", error=tf.errors.FailedPreconditionError)
        hvd.join()
    assert hvd.allgather_object(RANK) == list(range(SIZE))


# ---- compression -----------------------------------------------------------------------------------------------------


@row("Compression", BETTER, "`bf16`, too: the range of float32")
@row("Compression.none", WORKS)
@row("Compression.fp16", WORKS, "16 bits travel; integers as they are")
def check_name_Compression():
    fine = tf.constant([1 + 2.0**-12])
    assert_same(hvd.allreduce(fine, compression=hvd.Compression.none), [1 + 2.0**-12])
    assert float(hvd.allreduce(fine, compression=hvd.Compression.fp16)[0]) == 1
    assert float(hvd.allreduce(tf.constant([2.0**100]), compression=hvd.Compression.bf16)[0]) == 2.0**100


@row("compression.Compressor", BETTER, "derive from it: what it does not define leaves tensors alone")
@row("compression.Compressor.compress", BETTER, "Horovod's returns nothing")
@row("compression.Compressor.decompress", BETTER, "Horovod's returns nothing")
@row("compression.NoneCompressor", WORKS)
@row("compression.NoneCompressor.compress", WORKS)
@row("compression.NoneCompressor.decompress", WORKS)
@row("compression.FP16Compressor", WORKS)
@row("compression.FP16Compressor.compress", WORKS, "tensors of 16 bits are left as they are")
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


# ---- what there is not -----------------------------------------------------------------------------------------------


@row(
    "broadcast_global_variables",
    REFUSED,
    "for graphs of TensorFlow 1: `broadcast_variables`; Horovod refuses it with TensorFlow 2, too",
)
@row("BroadcastGlobalVariablesHook", REFUSED, "for sessions of TensorFlow 1: `broadcast_variables`")
def check_name_broadcast_global_variables():
    refuses(lambda: hvd.broadcast_global_variables, "broadcast_variables", error=AttributeError)
    refuses(lambda: hvd.BroadcastGlobalVariablesHook, "broadcast_variables", error=AttributeError)


@row("check_num_rank_power_of_2", REFUSED, "Adasum takes any number of ranks")
@row("handle_average_backwards_compatibility", REFUSED, "the functions with `average` see to it")
@row("gpu_available", REFUSED, "`tf.config.list_physical_devices('GPU')`")
@row("check_extension", REFUSED, "not documented; for Horovod's own code, as the four below")
@row("split_list", REFUSED)
@row("vars_to_refs", REFUSED)
@row("refs_to_vars", REFUSED)
@row("LocalGradientAggregationHelper", REFUSED)
def check_name_check_extension():
    refuses(lambda: hvd.check_num_rank_power_of_2, "any number", error=AttributeError)
    refuses(lambda: hvd.handle_average_backwards_compatibility, "average=", error=AttributeError)
    refuses(lambda: hvd.gpu_available, "list_physical_devices", error=AttributeError)
    for name in ("check_extension", "split_list", "vars_to_refs", "refs_to_vars", "LocalGradientAggregationHelper"):
        refuses(lambda name=name: getattr(hvd, name), "its own code", error=AttributeError)
