"""Describes the values that a traced step reads besides arguments and numeric variables, so ranks can compare them.

Examples are a tensor that the program has made, a lookup table, or a variable of strings. Tracing stores a reference in
the graph, and every rank has its own object. Objects that are drawn without a seed, adapted to different data, or
listed from a set may differ between ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tensorflow.core.framework import tensor_pb2

from keras_ddl import cut
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.agreement.equal_values import fingerprint
from keras_ddl.strategy.shards.sharded_slots import sharded_variable_of_handle

_SHOWN = 3  # number of values in a message
_TENSOR_REMEDY = (
    "Draw it from a seed, or compute it from the same data on every rank; or make it a weight (self.add_weight), which "
    "gets rank 0's values; or have rank 0 send it with keras_ddl.broadcast_object."
)
_TABLE_REMEDY = (
    "Give every rank the same entries in the same order: adapt to the same data, and write sorted(...) around a set, "
    "whose order differs between processes unless PYTHONHASHSEED is the same."
)
_OUTSIDE = "Read it outside of the step, and pass the result as an argument."
_ORDER_REMEDY = (
    "Use the variables of a model in the same order on every rank: a list of layers has a fixed order, but a set "
    "does not."
)
# Attributes of operations on tables: types of keys and values.
_TYPES = (("Tin", "Tout"), ("Tkeys", "Tvalues"), ("key_dtype", "value_dtype"))
_VARIANTS = ("tensorflow::TensorList", "RaggedTensorVariant")  # variants whose contents can be read


class Read(NamedTuple):
    """Something that a step reads.

    Attributes:
        digest: 8 bytes that differ if the value differs.
        kind: the kind of the value.
        outer: the captured tensor.
        line: returns the program's line that reads it.
        show: returns a short text of its value.
    """

    digest: bytes
    kind: str
    outer: tf.Tensor
    line: Callable[[], str]
    show: Callable[[], str]
    remedy: str = _TENSOR_REMEDY


def reads_of(step: str, program: cut.Program, places: Mapping[int, int], rank: int) -> list[Read]:
    """Returns everything that a program captures, in order; for numeric variables, only their kind.

    places: id of a variable's handle -> the variable's number, equal on all ranks.

    Cost: reads all values once, tensors on a CPU in place.
    Raises: ConfigError: it captures something that cannot be compared.
    """
    agreed = {id(each.handle) for each in program.graph.variables}  # other variables appear as bare handles
    reads = []
    for value, outer in program.captured:
        if not program.readers(value):
            continue
        dtype = tf_compat.variable_dtype(value.tensor) if value.dtype == tf.resource else None
        if dtype is None:
            reads.append(_read(step, program, value, outer, rank))
        else:
            kind = f"{dtype.name}{_extents(tf_compat.variable_shape(value.tensor))}"
            is_agreed = sharded_variable_of_handle(outer) is not None or id(outer) in agreed and dtype != tf.string
            reads.append(_variable_read(outer, dtype, kind, places.get(id(outer)), is_agreed, _line(program, value)))
    return reads


def _line(program: cut.Program, value: cut.Value) -> Callable[[], str]:
    return lambda: next((line for node in program.readers(value) if (line := cut.line_of(node))), "")


def _read(step: str, program: cut.Program, value: cut.Value, outer: tf.Tensor, rank: int) -> Read:
    line = _line(program, value)
    kind = f"{value.dtype.name}{_extents(value.tensor.shape)}"
    if value.dtype == tf.resource:
        return _resource_read(step, program, value, outer, line, rank)
    if not tf_compat.is_eager(outer):
        raise _refusal(step, "a tensor of a function around the step", line, rank, "Pass it as an argument.")
    if value.dtype == tf.string and cut.has_no_result(value, program):
        return Read(_digest(kind), kind, outer, line, lambda: kind)
    if value.dtype != tf.variant:
        return Read(_digest(kind, fingerprint(outer)), kind, outer, line, lambda: _some(outer))
    if any("Dataset" in each.type or "Iterator" in each.type for each in cut.uses(program, value)):
        raise _refusal(step, "a dataset", line, rank, _OUTSIDE)
    serialized = tensor_pb2.TensorProto.FromString(tf.io.serialize_tensor(outer).numpy())
    names = [each.type_name for each in serialized.variant_val]
    if not set(names) <= set(_VARIANTS):
        raise _refusal(step, f"a tensor of {', '.join(names)}", line, rank, _OUTSIDE)
    content = serialized.SerializeToString(deterministic=True)
    return Read(_digest(kind, content), kind, outer, line, lambda: "other values")


def _variable_read(
    outer: tf.Tensor, dtype: tf.DType, kind: str, place: int | None, is_agreed: bool, line: Callable[[], str]
) -> Read:
    """is_agreed: the variable gets rank 0's value, or each rank has its own part of it."""
    kind = f"variable {'' if place is None else f'{place} of the model, '}{kind}"
    if is_agreed:
        return Read(_digest(kind), kind, outer, line, lambda: "", _ORDER_REMEDY)

    def read() -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=outer, dtype=dtype)

    return Read(_digest(kind, fingerprint(read())), kind, outer, line, lambda: _some(read()))


def _resource_read(
    step: str, program: cut.Program, value: cut.Value, outer: tf.Tensor, line: Callable[[], str], rank: int
) -> Read:
    operations = cut.uses(program, value)
    if not operations:
        raise _refusal(step, "a resource that the step passes on", line, rank, _OUTSIDE)
    if all(each.type in cut.RESOURCE_OPERATIONS and not is_inside for each, is_inside in operations.items()):
        return Read(_digest("of rank 0"), "a resource", outer, line, lambda: "a resource")
    if all(each.type.startswith("LookupTable") for each in operations):
        return _table_read(_types_in([*operations]), outer, line)
    if (types := _types_found_in(outer)) is not None:  # a table that another package's operation reads
        return _table_read(types, outer, line)
    other, is_inside = next(
        each for each in operations.items() if each[0].type not in cut.RESOURCE_OPERATIONS or each[1]
    )
    where = " in a branch or a loop" if is_inside else ""
    raise _refusal(step, f"a resource that {other.type} reads{where}", line, rank, _OUTSIDE)


def _types_in(operations: Sequence[tf.Operation]) -> tuple[tf.DType, tf.DType] | None:
    """Returns the types of a table's keys and values according to operations on it; None: unknown."""
    for operation in operations:
        for keys, values in _TYPES:
            if {keys, values} <= set(operation.node_def.attr):
                return operation.get_attr(keys), operation.get_attr(values)
    return None


def _types_found_in(resource: tf.Tensor) -> tuple[tf.DType, tf.DType] | None:
    """Finds the types of keys and values of a resource by trying lookups; None: it is not a table of common types."""
    for keys, values in itertools.product((tf.string, tf.int64, tf.int32), (tf.int64, tf.int32, tf.string, tf.float32)):
        none = tf.zeros([0], keys) if keys != tf.string else tf.constant([], tf.string)
        default = tf.zeros([], values) if values != tf.string else tf.constant("")
        with contextlib.suppress(tf.errors.OpError):  # another type, or not a table
            tf.raw_ops.LookupTableFindV2(table_handle=resource, keys=none, default_value=default)
            return keys, values
    return None


def _table_read(types: tuple[tf.DType, tf.DType] | None, table: tf.Tensor, line: Callable[[], str]) -> Read:
    size = int(tf.raw_ops.LookupTableSizeV2(table_handle=table))
    if types is None:  # the step reads only the table's number of entries
        return Read(_digest("table", size.to_bytes(8)), "table", table, line, lambda: f"{size} entries", _TABLE_REMEDY)
    key_type, value_type = types

    def entries() -> tuple[tf.Tensor, tf.Tensor]:
        return tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=key_type, Tvalues=value_type)

    def show() -> str:
        keys, values = (tf_compat.as_array(each) for each in entries())
        order = np.argsort(values, axis=0, kind="stable").ravel() if values.ndim == 1 else range(len(keys))
        some = [f"{keys[place]!r}: {values[place]!s}" for place in order]
        if size > _SHOWN + 1:
            some[_SHOWN:-1] = ["..."]
        return f"{size} entries {{{', '.join(some)}}}"

    kind = f"table from {key_type.name} to {value_type.name}"
    return Read(_digest(kind, _unordered(*entries())), kind, table, line, show, _TABLE_REMEDY)


def _unordered(keys: tf.Tensor, values: tf.Tensor) -> bytes:
    """Returns a digest of the pairs of rows of two tensors that does not depend on their order."""
    count = int(keys.shape[0])
    if not count:
        return b""
    with tf.device("CPU:0"):
        each = [
            tf.raw_ops.Fingerprint(data=tf.reshape(rows, [count, -1]), method="farmhash64") for rows in (keys, values)
        ]
        pair_fingerprints = tf.raw_ops.Fingerprint(data=tf.concat(each, 1), method="farmhash64").numpy()
    return count.to_bytes(8) + int(np.add.reduce(pair_fingerprints.view(np.uint64), axis=None)).to_bytes(8)


def _digest(kind: str, content: bytes = b"") -> bytes:
    return hashlib.sha256(kind.encode() + b"\n" + content).digest()[:8]


def _some(tensor: tf.Tensor) -> str:
    values = np.asarray(tf_compat.as_array(tensor)).reshape(-1)
    some = [f"{each:.6g}" if isinstance(each, float) else str(each) for each in values[:_SHOWN].tolist()]
    return f"{', '.join(some)}{', ...' if len(values) > _SHOWN else ''}"


def _extents(shape: Any) -> str:
    if shape is None or shape.rank is None:
        return "[...]"
    return f"[{', '.join('?' if each is None else str(each) for each in shape)}]"


def _refusal(step: str, what: str, line: Callable[[], str], rank: int, remedy: str) -> ConfigError:
    where = f" ({found})" if (found := line()) else ""
    return ConfigError(
        f"{step}: every value that a step reads from outside must be comparable between ranks. Received: "
        f"{what}{where}, which cannot be compared (rank {rank}). {remedy}"
    )
