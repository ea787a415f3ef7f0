"""What an operation asks for beside its inputs: attributes that its type does not declare, and a device.

An operation carries them itself, or the function that it calls does. One table decides each; what it does not know may
mean anything, so such an operation is made as it is: whole, on every rank, with all that it asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


class Fate(Enum):
    """What becomes of an attribute."""

    DROPPED = "it does not change values, and a rank's graph has no use for it"
    COPIED = "what a rank makes of the operation carries it, too"
    KEEPS = "the operation is made as it is, unless the attribute is False"


COMPILED = "compiled by XLA"
_COMPILES = ("_XlaMustCompile", "_XlaCompile")  # tf.function(jit_compile=True), tf.xla.experimental.jit_scope

FATES: dict[str, Fate] = {
    **dict.fromkeys(_COMPILES, Fate.KEEPS),
    **dict.fromkeys(
        # Which operations of a jit_scope belong together.
        ("_XlaScope", "_XlaSeparateCompiledGradients", "_xla_propagate_compile_time_consts")
        # How TensorFlow runs branches and loops, and which variables a call only reads.
        + ("_lower_using_switch_merge", "_stateful_parallelism", "_read_only_resource_inputs"),
        Fate.COPIED,
    ),
    **dict.fromkeys(
        # Notes of the tracing process.
        ("_gradient_op_type", "_num_original_outputs", "_output_shapes", "_input_shapes", "_disable_acd")
        + ("_original_func_name", "_construction_context", "_disable_call_shape_inference", "_collective_manager_ids")
        + ("_has_manual_control_dependencies", "backward_function_name", "forward_function_name", "_user_specified_name")
        # How a call runs. What is called is written out, in the order in which the call ran it.
        + ("_noinline", "function_runs_at_most_once", "shared_rendezvous", "runtime_constant_optimization")
        + ("_tf_data_function",)
        # Other functions of the same values, for other devices or programs.
        + ("_implements", "api_implements", "api_preferred_device", "go_backwards", "time_major")
        # Places. Names of colocated operations mean nothing in another graph.
        + ("_class", "_OutputsOnOpDevice", "experimental_ints_on_device"),
        Fate.DROPPED,
    ),
    # These replace what is called by something else when it runs.
    **dict.fromkeys(
        ("disable_summaries_at_runtime", "tf_quant.composite_function", "tf_quant.quantized_ops")
        + tuple(f"_tftrt_{each}" for each in (
            "allow_build_at_runtime convert_function is_dyn_op trt_logger_name max_batch_size max_cached_engines "
            "max_workspace_size_bytes minimum_segment_size precision_mode profile_strategy use_calibration "
            "use_implicit_batch"
        ).split()),
        Fate.KEEPS,
    ),
}  # fmt: skip


def reason_to_keep(operation: tf.Operation, definition: Any) -> str | None:
    """Returns in words why an operation is made as it is, whole on every rank; None if it may be cut.

    definition: the operation's NodeDef.
    """
    if operation.type == "Const":
        return None
    declared = {each.name for each in operation.op_def.attr}
    found = set(_keeping((key, value) for key, value in definition.attr.items() if key not in declared))
    if operation.type in tf_compat.CALLS:
        found.update(_keeping(tf_compat.called_attributes(operation).items()))
    if not found.isdisjoint(_COMPILES):
        return COMPILED
    return f"asking for {', '.join(sorted(found))}" if found else None


def _keeping(attributes: Iterable[tuple[str, Any]]) -> Iterator[str]:
    for name, value in attributes:
        is_false = value.WhichOneof("value") == "b" and not value.b
        if FATES.get(name, Fate.KEEPS) is Fate.KEEPS and not (is_false and name in FATES):
            yield name


def of_made(definition: Any) -> dict[str, Any]:
    """Returns the attributes with which a rank makes an operation, of those in its NodeDef."""
    return {name: value for name, value in definition.attr.items() if FATES.get(name) is not Fate.DROPPED}


def device_within(outer: str, device: str) -> str:
    """Returns the device of an operation of a function that is called on device `outer`."""
    if not outer or not device:
        return outer or device
    return tf.DeviceSpec.from_string(outer).make_merged_spec(tf.DeviceSpec.from_string(device)).to_string()


def device_of_made(device: str) -> str | None:
    """Returns where a rank makes an operation; None: on the device of the step.

    A CPU is a rank's as well as one process's. Which of its accelerators one process takes does not matter to a rank,
    which has one.
    """
    found = tf.DeviceSpec.from_string(device) if device else None
    return f"/device:CPU:{found.device_index or 0}" if found is not None and found.device_type == "CPU" else None
