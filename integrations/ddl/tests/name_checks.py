"""Checks every name, option and variable of IBM's DDL as its documentation uses it. Run by test_ddl.py.

integrations/ddl/docs/ddl-names.md is generated from these rows, and from the command's rows in test_ddlrun.py
(tests/harness/name_tables.py).
"""

import contextlib
import importlib
import inspect
import io
import os
import shutil
import tempfile

import keras
import numpy as np
import tensorflow.compat.v1 as tf

import ddl
import keras_ddl
from harness.name_tables import BETTER, DDL, REFUSED, WORKS, row
from harness.refusing import refuses
from keras_ddl.ddl.options import parse
from keras_ddl.errors import RankMismatchError

RANK, SIZE = ddl.rank(), ddl.size()
MEAN = (SIZE + 1) / 2  # mean of rank + 1


@contextlib.contextmanager
def graph():
    """Opens a graph and a session in it."""
    with tf.Graph().as_default(), tf.Session() as session:
        yield session


def stepped(optimizer=None, gradients=None):
    """Returns by how much one step at rate 1 lowers a weight of 0, where the loss is (rank + 1) w."""
    with graph() as session:
        w = tf.Variable(0.0)
        optimizer = optimizer or tf.train.GradientDescentOptimizer(1.0)
        pairs = optimizer.compute_gradients(w * (RANK + 1.0)) if gradients is None else gradients(w)
        train = optimizer.apply_gradients(pairs)
        session.run(tf.global_variables_initializer())
        session.run(train)
        return -float(session.run(w))


def check_names_of_ddl_take_their_parameters():
    for name, parameters in DDL.names("ddl").items():
        value = getattr(ddl, name.removeprefix("ddl."))
        assert list(inspect.signature(value).parameters)[: len(parameters)] == parameters or not parameters, name
    assert sorted(DDL.names("ddl")) == sorted(f"ddl.{name}" for name in ddl.__all__)


# ---- the module ------------------------------------------------------------------------------------------------------


@row("ddl.init", WORKS, "options that contradict DDL_OPTIONS or differ between ranks are an error")
def check_name_init():
    ddl.init(options=os.environ["DDL_OPTIONS"])
    refuses(lambda: ddl.init(f"-mode r:1x{SIZE}"), "cannot change")
    refuses(lambda: ddl.init(f"-dev_sync {min(RANK, 1)}"), "equal on all ranks", error=RankMismatchError)
    refuses(lambda: ddl.init("-modes p"), "'-modes'", "-mode")


@row("ddl.rank", WORKS)
@row("ddl.size", WORKS)
@row("ddl.local_rank", WORKS)
@row("ddl.num_hosts", WORKS)
def check_name_rank():
    assert keras_ddl.all_gather_object((ddl.rank(), ddl.size())) == [(rank, SIZE) for rank in range(SIZE)]
    assert ddl.local_rank() == RANK and ddl.num_hosts() == 1


@row("ddl.bcast", BETTER, "in any order; if shapes differ, all ranks get the error")
def check_name_bcast():
    with graph() as session:
        w = tf.Variable(ddl.bcast(init_val=np.full([2], RANK + 1.0)), trainable=False)
        session.run(tf.global_variables_initializer())
        np.testing.assert_array_equal(session.run(w), [1.0, 1.0])


@row("ddl.allreduce_n", BETTER, "also mixed dtypes, IndexedSlices and None")
def check_name_allreduce_n():
    with graph() as session:
        slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([RANK]), tf.constant([SIZE, 1]))
        grads = ddl.allreduce_n([tf.constant(RANK + 1.0), None, slices], average=False)
        mean = ddl.allreduce_n(grads=[tf.constant(RANK + 1.0, tf.float64)])[0]
        assert grads[1] is None
        found = session.run([grads[0], tf.convert_to_tensor(grads[2]), mean])
        assert found[0] == MEAN * SIZE and found[2] == MEAN
        np.testing.assert_array_equal(found[1], np.ones([SIZE, 1]))


@row("ddl.grads_reduce", WORKS, "the optimizer does not reduce again")
def check_name_grads_reduce():
    for average, expected in ((True, MEAN), (False, MEAN * SIZE)):
        pairs = lambda w, average=average: ddl.grads_reduce([(tf.gradients(w * (RANK + 1.0), [w])[0], w)], average)  # noqa: E731
        assert stepped(gradients=pairs) == expected


@row("ddl.enable_broadcast", WORKS)
@row("ddl.disable_broadcast", WORKS, "for a graph that one rank initialises; applies when a variable is made")
def check_name_disable_broadcast():
    with graph() as session:
        ddl.disable_broadcast()
        own = tf.Variable(RANK + 1.0)
        ddl.enable_broadcast()
        shared = tf.Variable(RANK + 1.0)
        if RANK == 0:
            session.run(tf.variables_initializer([own]))  # does not wait for other ranks
        session.run(tf.global_variables_initializer())
        assert session.run([own, shared]) == [RANK + 1.0, 1.0]


@row(
    "ddl.DDLCallback",
    WORKS,
    "averages logs after each epoch ([`AverageLogs`](../../../docs/callbacks.md#averagelogs))",
)
@row(
    "ddl.DDLGlobalVariablesCallback",
    WORKS,
    "sends rank 0's variables, the optimizer's too, when training begins "
    "([`BroadcastVariables`](../../../docs/callbacks.md#broadcastvariables))",
)
def check_name_DDLCallback():
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.float32([[RANK + 1.0]])])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    data = np.ones([1, 1], np.float32), np.full([1, 1], 1.0 - RANK, np.float32)
    callbacks = [ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback()]
    logs = model.fit(*data, verbose=0, callbacks=callbacks).history
    np.testing.assert_array_equal(model.get_weights()[0], [[1.0]])
    np.testing.assert_allclose(logs["loss"], [np.mean([rank**2 for rank in range(SIZE)])])


# ---- what the import changes -----------------------------------------------------------------------------------------


@row("import ddl", WORKS, "with DDL_OPTIONS; started alone, it trains without DDL")
@row("DDL_OPTIONS", WORKS, "read at import; `KERAS_DDL_MODE` goes before its `-mode`")
def check_name_import_ddl():
    assert "DDL_OPTIONS" in os.environ and keras_ddl.is_initialized()
    assert importlib.import_module("ddl") is keras_ddl.ddl


@row(
    "tf.Session",
    WORKS,
    "sees its rank's GPU and takes its share of the cores, unless its config says otherwise",
)
@row(
    "tf.InteractiveSession",
    WORKS,
    "sees its rank's GPU and takes its share of the cores, unless its config says otherwise",
)
def check_name_Session():
    with tf.Graph().as_default():
        config = tf.ConfigProto(allow_soft_placement=True)
        for make in (tf.Session, tf.InteractiveSession):
            session = make(config=config)
            assert session._config.intra_op_parallelism_threads > 0
            assert session.run(ddl.allreduce_n([tf.constant(1.0)], average=False)[0]) == SIZE
            session.close()


@row(
    "tf.global_variables_initializer",
    WORKS,
    "trainable variables and their moving averages start from rank 0's values",
)
@row("tf.variables_initializer", WORKS, "trainable variables and their moving averages start from rank 0's values")
@row("tf.Variable.initializer", WORKS, "trainable variables and their moving averages start from rank 0's values")
def check_name_global_variables_initializer():
    with graph() as session:
        w, own = tf.Variable(RANK + 1.0), tf.Variable(RANK + 1.0, trainable=False)
        for initializer in (tf.global_variables_initializer(), tf.variables_initializer([w, own])):
            session.run(initializer)
            assert session.run([w, own]) == [1.0, RANK + 1.0]
        session.run([w.assign(RANK + 3.0), own.initializer])
        session.run(w.initializer)
        assert session.run([w, own]) == [1.0, RANK + 1.0]


@row(
    "tf.train.Optimizer",
    BETTER,
    "averages before clipping, and gradients of `tf.gradients` too; ranks need no common order",
)
def check_name_Optimizer():
    assert issubclass(tf.train.GradientDescentOptimizer, tf.train.Optimizer)
    assert stepped() == MEAN
    assert stepped(gradients=lambda w: [(tf.gradients(w * (RANK + 1.0), [w])[0], w)]) == MEAN
    optimizer = tf.train.GradientDescentOptimizer(1.0)
    clipped = lambda w: [(tf.minimum(g, 1.25), v) for g, v in optimizer.compute_gradients(w * (RANK + 1.0))]  # noqa: E731
    assert stepped(optimizer, clipped) == min(MEAN, 1.25)


@row(
    "keras.optimizers.Optimizer",
    BETTER,
    "averages in `fit` and by hand; Keras 3 refuses an optimizer of tf.train in `model.compile`",
)
def check_name_keras_Optimizer():
    variable = keras.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0)
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    optimizer.apply([keras.ops.convert_to_tensor(RANK + 1.0)], [variable])
    assert -float(variable) == MEAN
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    refuses(lambda: model.compile(tf.train.GradientDescentOptimizer(1.0), "mse"), "optimizer", error=ValueError)


@row("tf.train.MonitoredTrainingSession", BETTER, "`checkpoint_dir` may be rank 0's alone: all ranks start from it")
@row("tf.train.Saver", WORKS, "also old checkpoints; `restore` by hand is for all ranks")
def check_name_MonitoredTrainingSession():
    folder = keras_ddl.broadcast_object(tempfile.mkdtemp())
    with graph() as session:
        w = tf.Variable(RANK + 1.0, name="w")
        step = tf.train.get_or_create_global_step()
        session.run([tf.global_variables_initializer(), step.initializer])
        session.run([w.assign(7.0), step.assign(3)])
        saver = tf.train.Saver()
        if RANK == 0:
            saver.save(session, f"{folder}/model", global_step=3)
        session.run(w.assign(0.0))
        keras_ddl.barrier()
        saver.restore(session, f"{folder}/model-3")
        assert session.run(w) == 7
    with tf.Graph().as_default():
        w = tf.Variable(RANK + 1.0, name="w")
        step = tf.train.get_or_create_global_step()
        directory = folder if RANK == 0 else None
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=directory, save_summaries_steps=None, log_step_count_steps=None, save_checkpoint_secs=None
        ) as session:
            assert session.run([w, step]) == [7.0, 3]
    keras_ddl.barrier()
    if RANK == 0:
        shutil.rmtree(folder)


@row(
    "tf.train.export_meta_graph",
    WORKS,
    "the base graph has no operations of DDL: [a SavedModelBuilder](from-ddl.md#to-a-savedmodel)",
)
def check_name_export_meta_graph():
    with tf.Graph().as_default():
        w = tf.Variable(1.0)
        base = tf.train.export_meta_graph()
        tf.train.GradientDescentOptimizer(1.0).minimize(w * w)
        trained = tf.train.export_meta_graph()
    ours = [[node.op for node in meta.graph_def.node if node.op.startswith("Ddl")] for meta in (base, trained)]
    assert not ours[0] and ours[1]


# ---- options and variables -------------------------------------------------------------------------------------------


@row(
    "DDL_OPTIONS -mode p",
    WORKS,
    "`p`: the box follows the hosts; `p:4x2`: that box, ranks of a host first",
)
@row("DDL_OPTIONS -mode r", WORKS, "as `p`: the algorithm is measured")
@row("DDL_OPTIONS -mode b", WORKS, "as `p`: the algorithm is measured")
@row("DDL_OPTIONS -mode n", WORKS, "as `p`: the algorithm is measured")
@row("DDL_OPTIONS -mode m", WORKS, "as `p`: the algorithm is measured")
@row("DDL_OPTIONS -mode c", WORKS, "as `p`: the algorithm is measured")
def check_name_mode():
    assert keras_ddl.topology().mode == f"x:{SIZE}x1"
    for letter in ("p", "r", "b", "n", "m", "c"):
        ddl.init(f"-mode {letter}:{SIZE}x1")  # the running box: no error
        assert parse(f"-mode {letter}").mode == "p"
    refuses(lambda: parse("-mode q"), "'q'")
    ddl.init(os.environ["DDL_OPTIONS"])


def printed(options):
    """Returns what this rank prints on stderr while it initialises with options and reduces."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        ddl.init(options)
        try:
            assert stepped() == MEAN
        finally:
            ddl.init(os.environ["DDL_OPTIONS"])
    return text.getvalue()


@row("DDL_OPTIONS -dbg_level", WORKS, "1: rank 0 says what it runs on; 2: every rank, and what it reduces")
@row(
    "DDL_OPTIONS -dump_iter",
    WORKS,
    "every N reductions, rank 0 prints how long they took after the last gradient, and which rank was late",
)
@row("DDL_OPTIONS -dev_sync", WORKS, "no effect: tensors are there when an op gets them")
@row("DDL_OPTIONS -rebind_iter", WORKS, "no effect: ranks are not bound to cores")
def check_name_dbg_level():
    assert ("device" in printed("-dbg_level 1")) == (RANK == 0)
    assert "device" in (text := printed("-dbg_level 2")) and "reduces 1 gradients" in text
    assert ("jitter: rank" in printed("-dump_iter 1")) == (RANK == 0)
    assert printed("-dev_sync 2 -rebind_iter 30") == ""


@row(
    "DDL_GROUP_SIZE",
    WORKS,
    "the largest reduction in elements of 4 bytes; by default [measured](../../../docs/strategy.md#buckets)",
)
def check_name_DDL_GROUP_SIZE():
    def reductions():
        with tf.Graph().as_default() as made:
            ddl.allreduce_n([tf.ones([80])] * 3)
            return sum(op.type == "DdlAllReduceN" for op in made.get_operations())

    before = os.environ.get("DDL_GROUP_SIZE")
    assert reductions() == 1
    os.environ["DDL_GROUP_SIZE"] = "100"
    try:
        ddl.init(os.environ["DDL_OPTIONS"])
        assert reductions() == 3
    finally:
        del os.environ["DDL_GROUP_SIZE"]
        ddl.init(os.environ["DDL_OPTIONS"])
    assert before is None and reductions() == 1


# ---- missing names ---------------------------------------------------------------------------------------------------


@row("ddl.Init", REFUSED, "an older interface: call `ddl.init(options)`")
@row("ddl_MDR", REFUSED, "the op library of that interface: `import ddl`")
@row("pyddl", REFUSED, "memory on the GPU: `keras_ddl.communicator` has collectives on arrays")
def check_name_Init():
    refuses(lambda: ddl.Init(4, mode="-mode p"), "init", error=AttributeError)
    for name in ("ddl_MDR", "pyddl"):
        refuses(lambda name=name: importlib.import_module(name), name, error=ModuleNotFoundError)
