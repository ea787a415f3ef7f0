"""Locates a graph's variables in a Saver's checkpoint, and restores them in a session.

A meta graph records a variable's place in three ways, tried in this order: the operations of its own Saver, which may
use other names than the graph (for example, for moving averages); for a part of a partitioned variable, a record of
tensor and slice in a collection; and the variable's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.errors import ExportError

VARIABLES = ("VarHandleOp", "VariableV2", "Variable")
_ASSIGNS = ("Assign", "AssignVariableOp")
_MOST = 12


@dataclass(frozen=True)
class Place:
    """A variable's tensor in a checkpoint. `slices`: (offset, length) of each dimension; None: the complete tensor."""

    tensor: str
    shape: tuple[int, ...] | None = None  # shape of the complete tensor if the variable is a slice
    slices: tuple[tuple[int, int], ...] | None = None

    def of(self, tensor: Any) -> Any:
        """Returns the variable's slice of the complete tensor."""
        if self.slices is None:
            return tensor
        return tensor[tuple(slice(offset, offset + length) for offset, length in self.slices)]


@dataclass(frozen=True)
class _Restore:
    """A Saver's restore of a variable: the place that it reads, the tensor with the value, the assign operation."""

    place: Place
    tensor: str
    assign: str


def places(meta: Any, servable: Any, prefix: Path) -> dict[str, Place]:
    """Returns operation of a variable in the served graph -> its place in the checkpoint.

    Raises: ExportError: the checkpoint lacks a variable, or has it with another shape or dtype.
    """
    import tensorflow as tf

    saved = {name: each.place for name, each in _restores(meta.graph_def, meta.saver_def.restore_op_name).items()}
    sliced = _slices(meta)
    reader = tf.train.load_checkpoint(str(prefix))
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    result, missing, others = {}, [], []
    for node in servable.node:
        if node.op not in VARIABLES:
            continue
        place = result[node.name] = saved.get(node.name) or sliced.get(node.name) or Place(node.name)
        as_what = f"{node.name} (saved as {place.tensor})" if place.tensor != node.name else node.name
        if place.tensor not in shapes:
            missing.append(as_what)
            continue
        shape = tf.TensorShape(node.attr["shape"].shape if place.shape is None else place.shape)
        dtype = tf.as_dtype(node.attr["dtype"].type)
        here, there = f"{dtype.name}{shape}", f"{dtypes[place.tensor].name}{tuple(shapes[place.tensor])}"
        if dtypes[place.tensor] != dtype or not shape.is_compatible_with(shapes[place.tensor]):
            others.append(f"{as_what}: {here} in the graph, {there} in the checkpoint")
    if missing or others:
        without = (
            f"without {', '.join(missing[:_MOST])}{' and more' if len(missing) > _MOST else ''}" if missing else ""
        )
        unlike = f"with {'; '.join(others[:_MOST])}" if others else ""
        raise ExportError(
            f"A checkpoint must hold each variable of the graph to be served. Received: {prefix}, "
            f"{' and '.join(filter(None, (without, unlike)))}. Check that the checkpoint belongs to this graph. A "
            "graph for inference must name its variables as the training graph does, or contain a Saver that maps the "
            "names."
        )
    return result


def saver_of(graph: Any, names: Iterable[str]) -> Any:
    """Returns a Saver of these variables under their own names."""
    import tensorflow as tf

    tensors = {}
    for name in names:
        operation = graph.get_operation_by_name(name)
        tensors[name] = operation.outputs[0]
        if operation.type == "VarHandleOp":
            tensors[name] = tf.raw_ops.ReadVariableOp(resource=tensors[name], dtype=operation.get_attr("dtype"))
    return tf.compat.v1.train.Saver(tensors, allow_empty=True)


def restore(session: Any, saver: Any, places: Mapping[str, Place], prefix: Path) -> None:
    """Assigns the variables of the session's graph: reads the values, and runs the assign operations of `saver`.

    Raises: ExportError: a value is NaN or Inf.
    """
    if saver.saver_def is None:  # no variables
        return
    restores = _restores(session.graph.as_graph_def(), saver.saver_def.restore_op_name)
    for name, value in _values(places, prefix):
        session.run(restores[name].assign, {restores[name].tensor: value})


def _values(places: Mapping[str, Place], prefix: Path) -> Iterator[tuple[str, Any]]:
    """Yields (variable, value). Reads the complete tensor of a partitioned variable once."""
    import numpy as np
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(prefix))
    key, tensor = "", np.empty(0)
    for name, place in sorted(places.items(), key=lambda pair: pair[1].tensor):
        if key != place.tensor:
            key, tensor = place.tensor, reader.get_tensor(place.tensor)
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise ExportError(
                f"Weights must be finite numbers to be served. Received: NaN or Inf in {place.tensor!r} of {prefix}. "
                "Take an earlier checkpoint."
            )
        yield name, place.of(tensor)


def _restores(graph: Any, operation: str) -> dict[str, _Restore]:
    """Returns variable -> how a Saver restores it. `operation`: the Saver's restoring operation, or ''."""
    import tensorflow as tf

    nodes = {node.name: node for node in graph.node}
    restores: dict[str, _Restore] = {}
    queue, seen = [operation], {operation}
    for name in queue:
        node = nodes.get(name)
        if node is None:
            continue
        if node.op not in _ASSIGNS:  # groups, including shards' groups
            after = [each[1:] for each in node.input if each.startswith("^")]
            queue += [each for each in after if each not in seen]
            seen.update(after)
            continue
        tensor = node.input[1]
        while tensor.partition(":")[0] in nodes and nodes[tensor.partition(":")[0]].op in ("Identity", "Reshape"):
            tensor = nodes[tensor.partition(":")[0]].input[0]
        source, _, number = tensor.partition(":")
        if source not in nodes or nodes[source].op != "RestoreV2":
            continue
        names, slices = (
            [each.decode() for each in tf.make_ndarray(nodes[part].attr["value"].tensor)]
            for part in nodes[source].input[1:3]
        )
        index = int(number or 0)
        place = Place(names[index], *_parsed(slices[index]))
        restores[node.input[0].partition(":")[0]] = _Restore(place, f"{source}:{index}", name)
    return restores


def _parsed(text: str) -> tuple[Any, Any]:
    """Parses TensorFlow's "10 4 0,5:-" to (shape of the complete tensor, slices), and '' to (None, None)."""
    if not text:
        return None, None
    *sizes, extents = text.split(" ")
    shape = tuple(map(int, sizes))
    parts = [
        (0, size) if each == "-" else tuple(map(int, each.split(","))) for each, size in zip(extents.split(":"), shape)
    ]
    return shape, tuple(parts)


def _slices(meta: Any) -> dict[str, Place]:
    """Returns part of a partitioned variable -> its place, from the graph's collections."""
    from tensorflow.core.framework import variable_pb2

    slices = {}
    for collection in ("variables", "trainable_variables", "model_variables", "local_variables"):
        for record in meta.collection_def[collection].bytes_list.value:
            variable = variable_pb2.VariableDef.FromString(record)
            part = variable.save_slice_info_def
            if part.full_name:
                extents = tuple(zip(part.var_offset, part.var_shape))
                name = variable.variable_name.partition(":")[0]
                slices[name] = Place(part.full_name, tuple(part.full_shape), extents)
    return slices
