"""Checks every public name of horovod.tensorflow, as Horovod's documentation uses it. Run by test_horovod.py.

The part's docs/horovod-names.md is generated from these rows (tests/harness/name_tables.py).
train_name_checks.py has the rows of optimizers, tapes, layers and Keras.
"""

import functools
import inspect
import json
import tempfile
from pathlib import Path

import numpy as np

import keras_ddl.horovod as hvd
from harness import refusing
from harness.name_tables import BETTER, HOROVOD, REFUSED, WORKS, row
from keras_ddl.compat.tensorflow import tf
from keras_ddl.horovod import compression
from keras_ddl.horovod import keras as hvd_keras

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def assert_same(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-6)


refuses = functools.partial(refusing.refuses, error=ValueError)


def ours(name):
    """Returns keras_ddl's object for a name of HOROVOD.names()."""
    places = {"horovod": hvd, "compression": compression, "keras": hvd_keras, "callbacks": hvd_keras.callbacks}
    first, _, rest = name.partition(".")
    value = places.get(first, hvd)
    for part in (rest if first in places else name).split("."):
        value = getattr(value, part)
    return value


# ---- all rows --------------------------------------------------------------------------------------------------------


def check_names_take_horovods_parameters_in_order():
    listed = [
        (HOROVOD.sections[key].prefix + name, parameters)
        for key, names in HOROVOD.lists().items()
        for name, parameters in names.items()
        if isinstance(parameters, list)
    ]
    elsewhere = {}  # name -> parameters at another position here
    for name, parameters in listed:
        found = HOROVOD.row_of(name)
        # Parameters of an optimizer's or a tape's methods are tested by their own checks.
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


def check_modules_share_their_names():
    for module, names in HOROVOD.lists().items():
        here = {"horovod.tensorflow.compression": compression}.get(module, hvd_keras)
        for name, origin in names.items():
            if not isinstance(origin, str) or any(each in f"{module}.{origin}" for each in ("elastic", "is_version")):
                continue
            owner, _, last = origin.rpartition(".")
            if "." in name:  # inherited from another class
                assert ours(HOROVOD.sections[module].prefix + name) is not None
                continue
            if f"{owner}.{last}" in HOROVOD.sections:  # a module
                assert inspect.ismodule(getattr(here, name)), origin
            else:
                assert getattr(here, name) is getattr(hvd, last), f"{module}.{name}"


# ---- the job ---------------------------------------------------------------------------------------------------------


@row("init", WORKS, "a second call changes nothing; TensorFlow gets the rank's share of the cores")
@row("init(comm)", WORKS, "all ranks only: None, a list or an MPI communicator; for some ranks, use process sets")
@row("init(process_sets)", BETTER, 'sets may be added at any time, without "dynamic"')
@row("is_initialized", WORKS)
@row("shutdown", WORKS)
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


@row("rank", WORKS, "before `init` NotInitializedError; Horovod's is a ValueError")
@row("size", WORKS)
@row("local_rank", WORKS)
@row("local_size", WORKS)
@row("cross_rank", WORKS)
@row("cross_size", WORKS)
@row("is_homogeneous", WORKS)
def check_name_rank():
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous() is True


@row("rank_op", WORKS)
@row("size_op", WORKS)
@row("local_rank_op", WORKS)
@row("local_size_op", WORKS)
@row("process_set_included_op", BETTER, "an unknown set is an error, not a negative number")
def check_name_rank_op():
    @tf.function
    def numbers():
        return hvd.rank_op(name="r"), hvd.size_op(0, name="s"), hvd.local_rank_op(name="l"), hvd.local_size_op(name="m")

    assert [int(each) for each in numbers()] == [RANK, SIZE, RANK, SIZE]
    assert all(each.dtype == tf.int32 for each in numbers())
    assert int(hvd.process_set_included_op(process_set_id=0, name="i")) == 1
    refuses(lambda: hvd.process_set_included_op(77), "77")


@row("mpi_built", WORKS)
@row("mpi_enabled", WORKS, "False for a rank that runs alone")
@row("mpi_threads_supported", WORKS)
def check_name_mpi_built():
    assert hvd.mpi_built() is True
    assert hvd.mpi_enabled() is hvd.mpi_threads_supported() is True


@row("gloo_built", WORKS, "always False")
@row("gloo_enabled", WORKS, "always False")
@row("nccl_built", WORKS, "0: GPU tensors pass through host memory")
@row("ddl_built", WORKS, "always False")
@row("ccl_built", WORKS, "always False")
@row("cuda_built", WORKS, "always False")
@row("rocm_built", WORKS, "always False")
def check_name_gloo_built():
    assert hvd.gloo_built() is hvd.gloo_enabled() is hvd.ddl_built() is hvd.ccl_built() is False
    assert hvd.cuda_built() is hvd.rocm_built() is False
    assert hvd.nccl_built() == 0


@row(
    "start_timeline",
    BETTER,
    "[a file per rank](../../../observe/timeline/docs/timeline.md), without `HOROVOD_TIMELINE=DYNAMIC`",
)
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


@row(
    "Average", BETTER, "computed in the collective: float16 does not overflow inside a host; integers round toward zero"
)
@row("Sum", WORKS)
@row("Min", WORKS, "its gradient goes to the rank with the smallest value")
@row("Max", WORKS, "its gradient goes to the rank with the largest value")
@row("Product", WORKS)
@row(
    "Adasum",
    BETTER,
    "[any number of ranks](../../../docs/collectives.md#adaptive-sums-opadasum), and process sets; not in the "
    "optimizer",
)
def check_name_Average():
    x = tf.constant([RANK + 1.0, 2.0])
    parts = np.array([[rank + 1.0, 2.0] for rank in range(SIZE)])
    for op, expected in ((hvd.Average, np.mean), (hvd.Sum, np.sum), (hvd.Min, np.min), (hvd.Max, np.max)):
        assert_same(hvd.allreduce(x, op=op), expected(parts, axis=0))
    assert_same(hvd.allreduce(x, op=hvd.Product), np.prod(parts, axis=0))
    unit = tf.one_hot(RANK, SIZE)
    assert_same(hvd.allreduce(unit, op=hvd.Adasum), np.ones(SIZE))
    assert_same(hvd.grouped_allreduce([x, unit], op=hvd.Adasum)[1], np.ones(SIZE))


@row("ProcessSet", WORKS)
@row("ProcessSet(ranks_or_comm)", REFUSED, "a communicator of MPI: list its ranks")
@row("ProcessSet.process_set_id", WORKS)
@row("ProcessSet.ranks", WORKS)
@row("ProcessSet.mpi_comm", WORKS, "always None")
@row("ProcessSet.size", BETTER, "an error before registration, not None")
@row("ProcessSet.rank", BETTER, "an error before registration, not None")
@row("ProcessSet.included", BETTER, "an error before registration, not None")
@row(
    "add_process_set", BETTER, "without `HOROVOD_DYNAMIC_PROCESS_SETS`; different sets on different ranks are an error"
)
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
    refuses(lambda: hvd.ProcessSet(MPI.COMM_WORLD), "list its ranks")


@row("global_process_set", WORKS)
def check_name_global_process_set():
    everybody = hvd.global_process_set
    assert (everybody.process_set_id, everybody.ranks, everybody.rank()) == (0, list(range(SIZE)), RANK)
    assert_same(hvd.allreduce(tf.ones([2]), op=hvd.Sum, process_set=everybody), [SIZE] * 2)
    assert not hvd.remove_process_set(everybody)


# ---- missing names ---------------------------------------------------------------------------------------------------


@row("broadcast_global_variables", WORKS, "in graphs; RuntimeError in eager execution, as in Horovod")
def check_name_broadcast_global_variables():
    refuses(lambda: hvd.broadcast_global_variables(0), "broadcast_variables", error=RuntimeError)


@row("BroadcastGlobalVariablesHook", WORKS)
def check_name_broadcast_global_variables_hook():
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=float(RANK))
        with tf.compat.v1.train.MonitoredSession(
            hooks=[hvd.BroadcastGlobalVariablesHook(root_rank=SIZE - 1)]
        ) as session:
            assert_same(session.run(variable), SIZE - 1)


@row("check_num_rank_power_of_2", REFUSED, "Adasum takes any number of ranks")
@row("handle_average_backwards_compatibility", REFUSED, "functions with `average` do it")
@row("gpu_available", REFUSED, "`tf.config.list_physical_devices('GPU')`")
@row("check_extension", REFUSED, "undocumented, for Horovod's own code")
@row("split_list", REFUSED)
@row("vars_to_refs", REFUSED)
@row("refs_to_vars", REFUSED)
@row("LocalGradientAggregationHelper", REFUSED)
def check_name_check_extension():
    refuses(lambda: hvd.check_num_rank_power_of_2, "any number", error=AttributeError)
    refuses(lambda: hvd.handle_average_backwards_compatibility, "average=", error=AttributeError)
    refuses(lambda: hvd.gpu_available, "list_physical_devices", error=AttributeError)
    for name in ("check_extension", "split_list", "vars_to_refs", "refs_to_vars", "LocalGradientAggregationHelper"):
        refuses(lambda name=name: getattr(hvd, name), "internal to Horovod", error=AttributeError)
