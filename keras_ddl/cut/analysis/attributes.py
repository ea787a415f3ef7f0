"""Attributes of an operation that its type does not declare, and its device.

Either the operation or the function that it calls carries such an attribute. One table decides about them. An unknown
attribute may mean anything, so an operation with one is built unchanged: replicated, with all its attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TypeAlias

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf

AttrValue: TypeAlias = tf.compat.v1.AttrValue
NodeDef: TypeAlias = tf.compat.v1.NodeDef


class Fate(Enum):
    """The treatment of an attribute."""

    DROPPED = "it does not change values, and a rank's graph has no use for it"
    COPIED = "the operation in a rank's graph also carries it"
    KEEPS = "the operation is built as it is, unless the attribute is False"


COMPILED = "compiled by XLA"
_COMPILES = ("_XlaMustCompile", "_XlaCompile")  # tf.function(jit_compile=True), tf.xla.experimental.jit_scope

_TABLE: list[tuple[Fate, str]] = [
    (Fate.KEEPS, " ".join(_COMPILES)),
    # They group the operations of a jit_scope, and list what a call only reads.
    (Fate.COPIED, "_XlaScope _XlaSeparateCompiledGradients _xla_propagate_compile_time_consts"),
    (Fate.COPIED, "_read_only_resource_inputs"),
    (Fate.COPIED, "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"),  # sums_in_order.py
    # They let the rounds of a loop overlap, so that random draws would come in a different order on each rank.
    (Fate.DROPPED, "_lower_using_switch_merge _stateful_parallelism"),
    # Notes that tracing leaves.
    (Fate.DROPPED, "_gradient_op_type _num_original_outputs _output_shapes _input_shapes _disable_acd"),
    (Fate.DROPPED, "_original_func_name _construction_context _disable_call_shape_inference"),
    (Fate.DROPPED, "_has_manual_control_dependencies backward_function_name forward_function_name"),
    (Fate.DROPPED, "_user_specified_name _tf_data_function"),
    # How a call runs. A rank inlines the called function, whose operations inherit the call's dependencies.
    (Fate.DROPPED, "_noinline function_runs_at_most_once shared_rendezvous runtime_constant_optimization"),
    (Fate.DROPPED, "_collective_manager_ids"),
    # Functions that compute the same values on other devices and in other programs.
    (Fate.DROPPED, "_implements api_implements api_preferred_device go_backwards time_major"),
    # Placement on devices. Colocated operations have other names in a rank's graph.
    (Fate.DROPPED, "_class _OutputsOnOpDevice experimental_ints_on_device"),
    # They replace the called function by other operations.
    (Fate.KEEPS, "disable_summaries_at_runtime tf_quant.composite_function tf_quant.quantized_ops"),
    (Fate.KEEPS, "_tftrt_convert_function _tftrt_allow_build_at_runtime _tftrt_is_dyn_op _tftrt_trt_logger_name"),
    (Fate.KEEPS, "_tftrt_max_batch_size _tftrt_max_cached_engines _tftrt_max_workspace_size_bytes"),
    (Fate.KEEPS, "_tftrt_minimum_segment_size _tftrt_precision_mode _tftrt_profile_strategy"),
    (Fate.KEEPS, "_tftrt_use_calibration _tftrt_use_implicit_batch"),
]
FATES = {name: fate for fate, names in _TABLE for name in names.split()}
_declared: dict[str, frozenset[str]] = {}  # by type of operation


def reason_to_keep(operation: tf.Operation, definition: NodeDef) -> str | None:
    """Returns, for a message, why an operation is built unchanged and replicated; None if it may be cut.

    definition: the operation's NodeDef.
    """
    if operation.type == "Const":
        return None
    declared = _declared_by(operation)
    result = set(_keeping((key, value) for key, value in definition.attr.items() if key not in declared))
    if operation.type in tf_compat.CALLS:
        result.update(_keeping(tf_compat.called_attributes(operation).items()))
    if not result.isdisjoint(_COMPILES):
        return COMPILED
    return f"asking for {', '.join(sorted(result))}" if result else None


def _declared_by(operation: tf.Operation) -> frozenset[str]:
    """Returns the names of the attributes that the type of an operation declares."""
    declared = _declared.get(operation.type)
    if declared is None:
        declared = _declared[operation.type] = frozenset(each.name for each in operation.op_def.attr)
    return declared


def _keeping(attributes: Iterable[tuple[str, AttrValue]]) -> Iterator[str]:
    for name, value in attributes:
        is_false = value.WhichOneof("value") == "b" and not value.b
        if FATES.get(name, Fate.KEEPS) is Fate.KEEPS and not (is_false and name in FATES):
            yield name


def for_build(operation: tf.Operation, definition: NodeDef) -> dict[str, AttrValue]:
    """Returns the attributes of an operation's NodeDef with which a rank builds it.

    An attribute that its type declares is never dropped: `time_major` is a note in a function, but a setting of
    CudnnRNNV3.
    """
    declared = _declared_by(operation)
    return {
        name: value
        for name, value in definition.attr.items()
        if name in declared or FATES.get(name) is not Fate.DROPPED
    }


def device_within(outer: str, device: str) -> str:
    """Returns the device of an operation of a function that is called on device `outer`."""
    if not outer or not device:
        return outer or device
    merged: str = tf.DeviceSpec.from_string(outer).make_merged_spec(tf.DeviceSpec.from_string(device)).to_string()
    return merged


def device_of_made(device: str) -> str | None:
    """Returns where a rank builds an operation; None: on the device of the step.

    A rank has CPUs as one process does. Which accelerator one process would use does not matter to a rank, because a
    rank has only one.
    """
    result = tf.DeviceSpec.from_string(device) if device else None
    return f"/device:CPU:{result.device_index or 0}" if result is not None and result.device_type == "CPU" else None
