"""Imports TensorFlow, checks it, and loads keras_ddl's ops; the only module that imports tensorflow.python.

Written for TensorFlow 2.21. Other modules write `from keras_ddl.compat.tensorflow import tf`, so that an environment in
which keras_ddl cannot work ends in a DependencyError with the remedy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from keras_ddl import config
from keras_ddl.communicator.native import native_library
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import replacing, tensorflow_packages
from keras_ddl.errors import DependencyError

# The oldest TensorFlow whose C API has everything that native/tf uses.
OLDEST = (2, 16)
# Versions with tested asynchronous kernels, which rely on how TensorFlow passes `done` (native/tf/kernels.cc).
TESTED = ((2, 16), (2, 17), (2, 18), (2, 19), (2, 20), (2, 21))
OPS = ("DdlBroadcast", "DdlAllReduce", "DdlAllReduceN", "DdlReduceScatter", "DdlAllGather", "DdlAllToAll")

tensorflow_packages.check_keras_backend()
tensorflow_packages.check_one_tensorflow()
try:
    import tensorflow as tf
except ImportError as error:
    raise tensorflow_packages.not_installed(error) from (None if error.name == "tensorflow" else error)
VERSION = tensorflow_packages.check_version(tf.__version__, OLDEST)


_WORKS = f"{TESTED[0][0]}.{TESTED[0][1]} to {TESTED[-1][0]}.{TESTED[-1][1]}"
with tensorflow_packages.private_imports("tensorflow", _WORKS):
    from tensorflow.python.autograph.pyct import loader as _autograph_loader
    from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset as ShuffleDataset
    from tensorflow.python.distribute.distribute_lib import UpdateContext
    from tensorflow.python.eager.cancellation import CancellationManager, CancellationManagerContext
    from tensorflow.python.eager.context import FunctionCallOptions, anonymous_name, global_seed
    from tensorflow.python.eager.context import context as _eager_context
    from tensorflow.python.eager.polymorphic_function import attributes as _attributes
    from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils
    from tensorflow.python.ops import (
        control_flow_util_v2,
        control_flow_v2_func_graphs,
        handle_data_util,
        ref_variable,
        resource_variable_ops,
    )

    # TensorFlow exports these for Keras.
    FuncGraph, EagerTensor = tf.__internal__.FuncGraph, tf.__internal__.EagerTensor
    # The class of every tf.function, and modules that define public classes.
    _Function = type(tf.function(lambda: None))
    _function_file = sys.modules[_Function.__module__].__file__
    variables: Any
    variables, variable_v1 = sys.modules[tf.Variable.__module__], sys.modules[tf.compat.v1.Variable.__module__]

if config.is_set("RUN_DIR"):
    # Puts autograph's generated files where the launcher removes them even if this process is killed.
    _in_run_dir = SimpleNamespace(
        NamedTemporaryFile=functools.partial(tempfile.NamedTemporaryFile, dir=config.get("RUN_DIR"))
    )
    replacing.set_values([(_autograph_loader, "tempfile", _in_run_dir)])

UninitializedVariable: Any = resource_variable_ops.UninitializedVariable
ResourceVariable: Any = resource_variable_ops.BaseResourceVariable

CALLS = ("PartitionedCall", "StatefulPartitionedCall")


F = TypeVar("F", bound=Callable[..., Any])

_loading = threading.Lock()


def do_not_convert(function: F) -> F:
    """Marks a function so that autograph does not convert it; a typed tf.autograph.experimental.do_not_convert."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def register_gradient(op_type: str) -> Callable[[F], F]:
    """Returns a decorator for the gradient of a type of operation; typed tf.RegisterGradient."""
    return cast(Callable[[F], F], tf.RegisterGradient(op_type))


def asynchronous() -> bool:
    """Whether the ops' kernels leave TensorFlow's threads free while ranks wait for each other."""
    chosen = config.get("TF_KERNELS")
    return VERSION in TESTED if chosen == "auto" else chosen == "async"


def load_ops() -> ModuleType:
    """Returns the module of generated functions (`ddl_all_reduce_n`, ...), loading the native library once.

    Raises:
        DependencyError: the library was not built, or this TensorFlow cannot load it.
    """
    with _loading:  # several threads may call the first collectives at once
        return _load_ops()


def ops_are_loaded() -> bool:
    """Returns whether `load_ops` was called."""
    return _load_ops.cache_info().currsize > 0


@functools.cache
def _load_ops() -> ModuleType:
    path = native_library.library_path("libkeras_ddl_tf.so")
    native_library.core()  # the ops find the communicator in the core that Python loaded
    if not asynchronous() and config.get("TF_KERNELS") == "auto":
        stack_position.warn(
            f"keras_ddl was not tested with TensorFlow {tf.__version__} (tested: {_WORKS}): its ops use synchronous "
            "kernels, and communication does not overlap with computation. Install a tested version to avoid this.",
            RuntimeWarning,
        )
    try:
        with config.override("TF_KERNELS", "async" if asynchronous() else "sync"):
            library: ModuleType = tf.load_op_library(str(path))
    except (tf.errors.OpError, OSError) as error:
        raise DependencyError(
            f"TensorFlow must be able to load keras_ddl's ops. Received: TensorFlow {tf.__version__} refused {path}: "
            f"{error}. Reinstall keras_ddl in this environment."
        ) from error
    missing = [name for name in OPS if not hasattr(library, name)]
    if missing:
        raise DependencyError(
            f"keras_ddl's libraries must belong together. Received: {path} without {', '.join(missing)} "
            "(the reason is on stderr). Reinstall keras_ddl in this environment."
        )
    if asynchronous():
        _free_from_program_order()
    return library


def _free_from_program_order() -> None:
    """Lets keras_ddl's ops in a tf.function run as soon as their inputs are ready.

    TensorFlow makes each stateful op without resources wait until the one before is COMPLETE, so collectives would
    overlap neither each other nor independent computation. The core matches requests by name, so any order works.
    Synchronous kernels keep the chain, because otherwise ranks could block all their threads in different ops.
    """
    free = auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS | frozenset(OPS)
    replacing.set_values([(auto_control_deps, "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS", free)])


def traced_for_xla() -> bool:
    """Whether a tf.function(jit_compile=True) is being traced on this thread.

    The traced graph does not show this, but the tf.function that traces it does, and that is on the stack.
    """
    if tf.executing_eagerly():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_filename == _function_file else None
        if isinstance(owner, _Function) and getattr(owner, "_jit_compile", False):
            return True
        frame = frame.f_back
    return False


def eager_config() -> Any:
    """Returns the ConfigProto of eager operations, with the devices and threads that tf.config has set."""
    return _eager_context().config


@contextlib.contextmanager
def optimized_once() -> Iterator[None]:
    """Halves the time in which TensorFlow optimizes graphs that this thread first runs, on CPUs, in the block.

    TensorFlow optimizes every graph in two passes, the second of which finds almost nothing, and also tries layouts and
    swapping, which only matter on accelerators. Settings of the program (tf.config.optimizer) stay. A graph is
    optimized again when it is called with other options, so all its calls must be made in such a block.
    """
    context = _eager_context()
    before = context.function_call_options
    context.function_call_options = _once_optimizing(before.executor_type, before.config_proto_serialized)
    try:
        yield
    finally:
        context.function_call_options = before


@functools.lru_cache(maxsize=8)
def _once_optimizing(executor: str | None, config_proto: bytes) -> Any:
    chosen = tf.compat.v1.ConfigProto.FromString(config_proto)
    rewriter = chosen.graph_options.rewrite_options
    rewriter.meta_optimizer_iterations = rewriter.meta_optimizer_iterations or rewriter.ONE
    rewriter.memory_optimization = rewriter.memory_optimization or rewriter.NO_MEM_OPT
    rewriter.layout_optimizer = rewriter.layout_optimizer or rewriter.OFF
    rewriter.disable_tfg_optimizer = True  # this experimental optimizer only infers shapes again
    return FunctionCallOptions(executor, chosen)


def clone_function(function: Any, python_function: Any) -> Any:
    """Returns a tf.function of `python_function` with the options of `function`."""
    return function._clone(python_function=python_function)


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has a value rather than an operation that will compute it."""
    return isinstance(tensor, EagerTensor)


def outermost_graph() -> Any:
    """Returns the graph of the outermost function that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
        graph = graph.outer_graph
    return graph


def as_array(value: Any) -> np.ndarray:
    """Like np.asarray, which fails for scalars of bfloat16 and float8. Shares the memory of a tensor if possible."""
    is_scalar = isinstance(value, (tf.Tensor, tf.Variable)) and value.shape.rank == 0
    return np.asarray(value.numpy() if is_scalar else value)


def called_graph(call: tf.Operation, attr: str = "f") -> Any:
    """Returns the graph of the function that an operation names in `attr`; None if TensorFlow does not have it."""
    try:
        return graph_of_function(call, call.get_attr(attr))
    except ValueError:
        return None


def called_graphs(call: tf.Operation) -> list[Any]:
    """Returns the graphs of the branches of a Case; None for a branch that TensorFlow does not have."""
    return [graph_of_function(call, each) for each in call.get_attr("branches")]


def graphs_of(operation: tf.Operation) -> list[Any]:
    """Returns the graphs of all functions that an operation names, as far as TensorFlow has them."""
    return [
        graph
        for graph in (graph_of_function(operation, each) for each in _functions_of(operation))
        if graph is not None
    ]


def lend_functions(operation: tf.Operation, graph: tf.Graph) -> None:
    """Registers the functions that an operation names in another graph, in which the operation is built again."""
    for each in _functions_of(operation):
        function = operation.graph._get_function(each.name)
        if function is not None and graph._get_function(each.name) is None:
            graph._add_function_recursive(function)


def _functions_of(operation: tf.Operation) -> list[Any]:
    if not any(each.type.endswith(("func", "func)")) for each in operation.op_def.attr):
        return []  # cheaper than reading its attributes
    return [f for each in operation.node_def.attr.values() for f in (each.func, *each.list.func) if f.name]


def graph_of_function(call: tf.Operation, function: Any) -> Any:
    """Returns the graph of a function that an operation names in an attribute; None if TensorFlow does not have it."""
    try:
        return call.graph._get_function(function.name).graph
    except (AttributeError, ValueError):
        return None


def called_attributes(call: tf.Operation) -> dict[str, Any]:
    """Returns the attributes of the function that a call operation calls; {} if TensorFlow does not have them."""
    try:
        function = call.graph._get_function(call.get_attr("f").name)
        return dict(function.cached_definition.attr)
    except (AttributeError, ValueError):
        return {}


def function_attributes() -> set[str]:
    """Returns the names of the attributes that TensorFlow lets a function have."""
    return set(_attributes.MONOMORPHIC_FUNCTION_ALLOWLIST)


def set_numbers(operation: tf.Operation, **attributes: int) -> None:
    """Changes integer attributes of an operation. Its graph must not have run."""
    for name, number in attributes.items():
        operation._set_attr(name, tf.compat.v1.AttrValue(i=number))


def add_control_input(operation: tf.Operation, before: tf.Operation) -> None:
    """Makes an existing operation wait for another one. Their graph must not have run."""
    operation._add_control_input(before)


# Skips a wrapper that checks for a deprecated argument in every call, which takes a quarter of the time of a cut.
create_op: Callable[..., tf.Operation] = getattr(tf.Graph.create_op, "__wrapped__", tf.Graph.create_op)


def is_stateful(operation: tf.Operation) -> bool:
    """Whether an operation has effects besides its outputs."""
    return bool(operation.op_def.is_stateful)


def written_resources(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the input resources that an operation may write: all of them, except those known to be only read."""
    reads, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return [each for each in operation.inputs if each.dtype == tf.resource and (each in writes or each not in reads)]


def variable_shape(handle: tf.Tensor) -> tf.TensorShape | None:
    """Returns the shape of the variable behind a handle in a graph; None: unknown."""
    data = handle_data_util.get_resource_handle_data(handle)
    if not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.TensorShape(data.shape_and_type[0].shape)


def variable_dtype(handle: tf.Tensor) -> tf.DType | None:
    """Returns the dtype of the variable behind a handle in a graph; None: it is not a variable's handle."""
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def plain_variable(dtype: tf.DType) -> tf.Tensor:
    """Returns the handle of a new variable without a value, of any shape, that lives as long as the handle.

    A tf.Variable that is made while a tf.function is traced would make TensorFlow trace the function again.
    """
    with tf.init_scope():
        return tf.raw_ops.VarHandleOp(dtype=dtype, shape=tf.TensorShape(None), shared_name=anonymous_name())


def variable_kind(handle: tf.Tensor) -> tuple[tf.TensorShape, tf.DType]:
    """Returns shape and dtype of the variable behind a handle in a graph. Raises: ValueError: unknown."""
    shape, dtype = variable_shape(handle), variable_dtype(handle)
    if shape is None or dtype is None:
        raise ValueError(f"not the handle of a variable: {handle}")
    return shape, dtype


def outputs_of_branches(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns, for a result of tf.cond or tf.switch_case, the value in each branch; [] for other tensors."""
    if is_eager(tensor):
        return []
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    operation = tensor.op
    if operation.type in ("If", "StatelessIf"):
        branches = [operation.get_attr("then_branch"), operation.get_attr("else_branch")]
    elif operation.type in ("Case", "StatelessCase"):
        branches = operation.get_attr("branches")
    else:
        return []
    graphs = [graph_of_function(operation, branch) for branch in branches]
    return [] if None in graphs else [graph.outputs[tensor.value_index] for graph in graphs]


def constant_value(tensor: tf.Tensor) -> Any:
    """Returns the value of a constant tensor as a NumPy array; None for other tensors.

    tf.get_static_value cannot evaluate products, slices and ranges of constants, which static shapes lead to.
    """
    value = tf.get_static_value(tensor)
    if value is not None or is_eager(tensor):
        return None if value is None else np.asarray(value)
    operation = tensor.op
    if operation.type == "Prod":
        of = constant_value(operation.inputs[0])
        return None if of is None else np.asarray(np.prod(of))
    if operation.type in ("Cast", "Identity"):
        return constant_value(operation.inputs[0])
    if operation.type == "StridedSlice" and tensor.shape.rank == 0 and operation.inputs[0].shape.rank == 1:
        of, at = constant_value(operation.inputs[0]), constant_value(operation.inputs[1])
        return None if of is None or at is None else np.asarray(of[at[0]])
    if operation.type == "Range":
        limits = [constant_value(each) for each in operation.inputs]
        return None if any(each is None for each in limits) else np.arange(*limits)
    return None


def session_callable(session: Any, options: Any) -> Callable[..., Any]:
    """Returns a function that runs a session according to CallableOptions.

    Session.make_callable runs Session.run, which takes 0.2 ms per call and compares shapes with those of placeholders;
    TensorFlow Serving leaves that check to the model.
    """
    return session._make_callable_from_options(options)  # type: ignore[no-any-return]


def after_checkpoint(path: str, options: tf.train.CheckpointOptions | None) -> None:
    """Like TensorFlow after writing a tf.train.Checkpoint, records its number and deletes old checkpoints."""
    for callback in (options and options.experimental_write_callbacks) or ():
        if inspect.signature(callback).parameters:
            callback(path)
        else:
            callback()
