"""Builds an operation that has a spec (factors.py) from operands in their placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import Dim, Uncertain, certain, if_certain
from keras_ddl.cut.analysis.placements import (
    PARTIAL,
    REPLICATED,
    Partial,
    PlacedOutputs,
    Placement,
    Sharded,
    TensorList,
)
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.analysis.variable_ops import READ
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import Factors, Kind, Linear, LocalOperands, OpSpec, ShapeOf, spec_of
from keras_ddl.cut.values.placed_values import Materializer


def pad(b: Context, tensor: tf.Tensor, placement: Sharded) -> tf.Tensor:
    """Returns a shard, with an entry of zeros along the sharded axis if this rank has no rows."""
    rows, axis = b.local_rows(placement), placement.axis
    if isinstance(rows, int) and rows:
        return tensor
    missing = 1 if isinstance(rows, int) else tf.cast(rows < 1, tf.int64)
    paddings = [[0, missing if each == axis else 0] for each in range(tensor.shape.rank)]
    return tf.pad(tensor, paddings)


def trim(b: Context, tensor: tf.Tensor, placement: Sharded) -> tf.Tensor:
    """Returns the result of an operation on padded shards without the entry of the padding."""
    rows, axis = b.local_rows(placement), placement.axis
    if isinstance(rows, int) and rows:
        return tensor
    extent = tf.shape(tensor, out_type=tf.int64)[axis]
    kept = extent * tf.cast(rows > 0, tf.int64)
    size = [kept if each == axis else -1 for each in range(tensor.shape.rank)]
    return tf.slice(tensor, b.vector([0] * tensor.shape.rank, tf.int64), b.vector(size))


def propagate(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds an operation on parts, or on shards along one factor; returns None if its spec allows neither.

    Raises: Uncertain.
    """
    spec = spec_of(node)
    if spec.kind is Kind.FORWARD:
        return _forward(b, node)
    made = if_certain(of_parts, b, node)
    if made is not None:
        return made
    factors = _factors(b, node, spec)
    choice = _factor_to_shard(b, node, factors)
    return None if choice is None else _build_on_shards(b, node, spec, factors, *choice)


def materialize(b: Context, node: Node) -> PlacedOutputs:
    """Builds an entrywise operation on replicated operands.

    If a rank can build its shard of an operand alone, for example of a random draw, it can also build its shard of the
    result alone.
    """
    made, result = b.make_replicated(node), node.outputs[0]
    is_one = len(node.outputs) == 1 and not node.after and result.dtype != tf.variant
    if is_one and any(map(b.has_materializer, node.inputs)):
        b.register_materializer(result, sharded_only(lambda placement: _materialized(b, node, placement)))
    return made


def sharded_only(build: Callable[[Sharded], tf.Tensor]) -> Materializer:
    """Returns a materializer that builds shards along an axis."""

    def materializer(placement: Sharded | TensorList) -> tf.Tensor:
        if not isinstance(placement, Sharded):
            raise Uncertain
        return build(placement)

    return materializer


def _materialized(b: Context, node: Node, placement: Sharded) -> tf.Tensor:
    factors = spec_of(node).factors(b.extents, node)
    label = factors.results[0][placement.axis]
    if not label.islower():
        raise Uncertain
    tensors = []
    for value, labels in zip(node.inputs, factors.operands):
        if isinstance(labels, str) and label in labels:
            shard = placement.at(labels.index(label))
            if not b.can_shard(value, shard):
                raise Uncertain
            tensors.append(b.redistributed(value, shard))
        else:
            tensors.append(b.replicated(value))
    return b.make(node, tensors)[0]


def _forward(b: Context, node: Node) -> PlacedOutputs:
    if not node.after:
        return b.forward(node)
    # A separate operation, because its result means that something else has run.
    outputs = b.make(node, [b.local(each) for each in node.inputs])
    return [(tensor, b.placement(value)) for tensor, value in zip(outputs, node.inputs)]


def _factors(b: Context, node: Node, spec: OpSpec) -> Factors:
    factors = spec.factors(b.extents, node)
    if factors.only_if_reshaped and not b.is_only_reshaped(node.outputs[0]):
        raise Uncertain
    return factors


def _factor_to_shard(b: Context, node: Node, factors: Factors) -> tuple[str, Sharded] | None:
    """Returns the factor along which to shard the operation, and how an operand is sharded along it.

    If operands are sharded along different factors, one that would have to be gathered is preferred, then the largest.
    """
    choices: list[tuple[str, Sharded, Value]] = []
    for value, labels in zip(node.inputs, factors.operands):
        placement = b.placement(value)
        if isinstance(placement, Sharded) and isinstance(labels, str) and labels[placement.axis].islower():
            choices.append((labels[placement.axis], placement, value))
    if len({(label, placement.at(0)) for label, placement, _ in choices}) > 1:
        choices = [each for each in choices if not b.has_replicated(each[2])] or choices
        choices.sort(key=lambda each: _size(b.extents.size(each[2])), reverse=True)
    return choices[0][:2] if choices else None


def _size(entries: Dim) -> tuple[int, int]:
    return len(entries.unknowns), entries.factor


def _build_on_shards(
    b: Context, node: Node, spec: OpSpec, factors: Factors, label: str, placement: Sharded
) -> PlacedOutputs:
    """Builds an operation whose operands are sharded along one factor, if they have it."""
    combine = _combine(spec, factors, label)
    shards = [
        placement.at(labels.index(label)) if isinstance(labels, str) and label in labels else None
        for labels in factors.operands
    ]
    for value, shard in zip(node.inputs, shards):
        if shard is not None and not b.can_shard(value, shard):
            raise Uncertain
    shapes = {
        value: _local_shape(b, value, labels, label, placement)
        for value, labels in zip(node.inputs, factors.operands)
        if isinstance(labels, ShapeOf)
    }
    late = [v for v, shard in zip(node.inputs, shards) if shard is None or isinstance(b.placement(v), Partial)]
    b.all_replicated([each for each in late if each not in shapes])
    tensors = []
    for value, shard in zip(node.inputs, shards):
        if value in shapes:
            tensors.append(tf.maximum(shapes[value], 1) if spec.never_empty else shapes[value])
        elif shard is None:
            tensors.append(b.replicated(value))
        else:
            tensor = b.redistributed(value, shard)
            tensors.append(pad(b, tensor, shard) if spec.never_empty else tensor)
    results: list[tuple[tf.Tensor, Placement]] = []
    for tensor, labels in zip(_make(b, node, spec, LocalOperands(tensors, factors, label)), factors.results):
        if label in labels:
            shard = placement.at(labels.index(label))
            results.append((trim(b, tensor, shard) if spec.never_empty else tensor, shard))
        else:
            results.append((tensor, Partial(combine)))
    return results


def _combine(spec: OpSpec, factors: Factors, label: str) -> str:
    """Returns how parts of results that lack the factor combine. Raises: Uncertain: the factor may not be reduced."""
    if all(label in each for each in factors.results):
        return "sum"
    # Rows of only one operand would be summed before they meet the other: if that holds an inf, a part of 0 gives NaN.
    if any(label not in labels for labels in factors.operands if isinstance(labels, str) and labels):
        raise Uncertain
    return factors.combine or certain(spec.combine)


def _make(b: Context, node: Node, spec: OpSpec, operands: LocalOperands) -> list[tf.Tensor]:
    return b.make(node, operands.tensors) if spec.make is None else spec.make(b, node, operands)


def _local_shape(b: Context, value: Value, labels: ShapeOf, label: str, placement: Sharded) -> tf.Tensor:
    """Returns the extents of this rank's shard, if the extents of the global tensor are certain."""
    entries = b.extents.numbers(value)
    if label not in labels.labels:
        return b.replicated(value)
    axis = labels.labels.index(label)
    if len(entries) != len(labels.labels) or entries[axis] != b.extent(placement):
        raise Uncertain
    return b.local_shape(entries, placement.at(axis), value.dtype)


def of_parts(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds an operation on parts if its spec says that this gives parts, without requesting a sum; else returns None.

    Raises: Uncertain: it may give parts or not.
    """
    spec = spec_of(node)
    placements = [b.placement(each) for each in node.inputs]
    parts = [index for index, placement in enumerate(placements) if isinstance(placement, Partial)]
    if not parts or all(_is_being_combined(b, node.inputs[each]) for each in parts):
        return None
    if spec.linear.adds and _continues_partial(b, node, placements):
        tensors = [b.redistributed(each, PARTIAL) for each in node.inputs]
    elif _gives_parts(b, node, spec.linear, placements, parts):
        tensors = [b.local(each) for each in node.inputs]
    else:
        return None
    if spec.make is None:  # parts need no factors
        made = b.make(node, tensors)
    else:
        made = spec.make(b, node, LocalOperands(tensors, _factors(b, node, spec), None))
    b.mark_linear(node)
    return [(tensor, placements[parts[0]]) for tensor in made]


def _is_being_combined(b: Context, value: Value) -> bool:
    """Whether parts are already being combined for another reader, so that their results need no separate sum."""
    placement = b.placement(value)
    return isinstance(placement, Partial) and b.requests.has(placement.op, b.origin(value))


def _gives_parts(b: Context, node: Node, linear: Linear, placements: Sequence[Placement], parts: Sequence[int]) -> bool:
    """Whether an operation of these parts gives parts that combine as they do."""
    first, placement = parts[0], placements[parts[0]]
    if placement != PARTIAL and not linear.moves:
        return False
    if linear.together:
        return all(each == placement for each in placements) and not (linear.adds and _is_repeated(b, node, parts))
    others = [each for index, each in enumerate(placements) if index != first]
    if first not in linear.at or not all(each == REPLICATED for each in others):
        return False
    return linear.when is None or linear.when(b, node, first)


def _continues_partial(b: Context, node: Node, placements: Sequence[Placement]) -> bool:
    """Whether the sum stays partial, to be made after the loop or together with accumulated gradients."""
    if not b.in_loop and not any(is_accumulated(b, each) for each in node.inputs):
        return False
    return all(each in (REPLICATED, PARTIAL) for each in placements) and not _is_repeated(
        b, node, range(len(placements))
    )


def is_accumulated(b: Context, value: Value) -> bool:
    """Whether a value is read from a variable that is the sum of parts that the ranks hold."""
    return value.node.type == READ and b.placement(value) == PARTIAL


def _is_repeated(b: Context, node: Node, operands: Sequence[int]) -> bool:
    """Whether one of these operands may be repeated by broadcasting; it is then smaller, so it is summed before."""
    return any(b.dims(node.inputs[each]) != b.dims(node.outputs[0]) for each in operands)


# ---- conditions of specs: Linear.when


def never(b: Context, node: Node, part: int) -> bool:
    """Never: a rank's part may be 0, and 0 times another operand that is inf would be NaN."""
    return False


def is_alone(b: Context, node: Node, part: int) -> bool:
    """Only without another operand, as for `never`."""
    return len(node.inputs) == 1


def is_floating(b: Context, node: Node, part: int) -> bool:
    """Only for floats: a mean of integers is rounded, and the rounded means of parts do not add up to it."""
    return bool(node.inputs[part].dtype.is_floating)


def widens(b: Context, node: Node, part: int) -> bool:
    """Only to a wider type: rounding parts before the sum differs from rounding the sum.

    A sum of halves may be inf where the sum of wider parts is finite.
    """
    source, target = node.inputs[part].dtype, node.outputs[0].dtype
    return bool(source.is_floating and target.is_floating and target.size > source.size)


def times_finite(b: Context, node: Node, part: int) -> bool:
    """Only if the other factor is certainly finite and not 0.

    Another factor may be inf, and 1 * inf + 0 * inf is not 1 * inf. Integers wrap around in any order.
    """
    exact = node.outputs[0].dtype.is_integer
    return (exact or _is_finite(b, node.inputs[1 - part])) and not _is_repeated(b, node, [part])


def over_finite(b: Context, node: Node, part: int) -> bool:
    """Only if the divisor is certainly finite and not 0."""
    return is_floating(b, node, part) and _is_finite(b, node.inputs[1]) and not _is_repeated(b, node, [part])


def _is_finite(b: Context, value: Value) -> bool:
    """Whether all entries are certainly finite and not 0: constants, and the number of rows as a float."""
    constant = value.constant()
    if constant is not None:
        return bool(np.all(np.isfinite(constant)) and np.all(constant))
    while value.node.type in ("Cast", "Identity") and not value.dtype.is_integer:
        if value.dtype == tf.float16:  # 65536 rows are infinitely many
            return False
        value = value.node.inputs[0]
    number = b.extents.number(value)
    return number.factor != 0 and all(each.kind == "rows" for each in number.unknowns)
