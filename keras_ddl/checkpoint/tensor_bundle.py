"""Writes and reads TensorFlow bundles (`prefix.index`, `prefix.data-*`) by key, with OSErrors.

Several processes may write one bundle. Each writes the tensors, or boxes of tensors, that it has, under its own prefix,
and `merge` makes one bundle of them. A reader gets complete tensors or any boxes of them, whichever boxes were written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_ddl.errors import KerasDdlError
from keras_ddl.files import durable
from keras_ddl.state.boxes import size

if TYPE_CHECKING:
    from keras_ddl.cut.values.layouts import Box

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # TensorFlow's key of the graph of objects
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"  # ends every variable's key in an object-based TensorFlow checkpoint

# The dtypes of which TensorFlow reads boxes (GetSliceValue in tensorflow/core/util/tensor_bundle/tensor_bundle.cc, 2.19
# to 2.21). It also writes boxes of other dtypes, but cannot read them.
DTYPES_IN_PARTS = frozenset(
    ["float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128"]
)


@dataclass(frozen=True)
class Part:
    """One process's part of a tensor.

    Attributes:
        shape: shape of the complete tensor.
        boxes: the boxes that the process has.
        values: the entries of the boxes, one box after the other, in any shape.
    """

    shape: tuple[int, ...]
    boxes: Sequence[Box]
    values: Any

    def box_tensors(self) -> list[Any]:
        """Returns a tensor for each box. A single one shares the memory of `values`."""
        import tensorflow as tf

        sizes = list(map(size, self.boxes))
        pieces = [self.values] if len(sizes) == 1 else tf.split(tf.reshape(self.values, [-1]), sizes)
        return [tf.reshape(each, [extent for _, extent in box]) for each, box in zip(pieces, self.boxes)]


def variable_key(*names: str) -> str:
    """Returns tf.train.Checkpoint's key of the variable at these attribute names."""
    return "/".join(name.replace(".", "..").replace("/", ".S") for name in names) + SUFFIX


def name_of(key: str) -> str:
    """Returns the last attribute name in a key of `variable_key`."""
    return _unescaped(key.removesuffix(SUFFIX).rsplit("/", 1)[-1])


def object_graph(keys: Iterable[str]) -> Any:
    """Returns the entry GRAPH of a bundle with these keys of `variable_key`, a string tensor.

    By it tf.train.Checkpoint finds the variables of an object; the variables of `Checkpoint(weights={"dense/kernel":
    ...})` are under "weights".
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.nodes.add()
    places: dict[tuple[str, ...], int] = {(): 0}
    for key in keys:
        names = tuple(map(_unescaped, key.removesuffix(SUFFIX).split("/")))
        for depth in range(len(names)):
            if names[: depth + 1] not in places:
                places[names[: depth + 1]] = len(graph.nodes)
                parent = graph.nodes[places[names[:depth]]]
                parent.children.add(node_id=len(graph.nodes), local_name=names[depth])
                graph.nodes.add()
        graph.nodes[places[names]].attributes.add(name="VARIABLE_VALUE", full_name=names[-1], checkpoint_key=key)
    return tf.constant(graph.SerializeToString(deterministic=True))


def write(prefix: str, tensors: Mapping[str, Any], parts: Mapping[str, Part] | None = None) -> None:
    """Writes tensors or tf.Variables, and parts of tensors, by key, as one bundle.

    Not atomic: write into a staging directory.

    Raises: OSError (also when TensorFlow reports a full disk or a missing permission).
    """
    import tensorflow as tf

    with tf.device("CPU:0"):
        entries = [(key, "", tf.convert_to_tensor(value)) for key, value in tensors.items()]
        for key, part in (parts or {}).items():
            entries += [(key, _spec(part.shape, box), value) for box, value in zip(part.boxes, part.box_tensors())]
        keys, specs, values = zip(*entries) if entries else ((), (), ())
        try:
            tf.raw_ops.SaveV2(prefix=prefix, tensor_names=keys, shape_and_slices=specs, tensors=values)
        except tf.errors.OpError as error:
            raise _as_os_error(error, prefix) from error


def write_in_parts(prefix: str, parts: Iterable[Mapping[str, Any]], beside: Mapping[str, Any]) -> None:
    """Writes a bundle part by part, with `beside` in the first part. Several parts give several data files.

    A part has tensors, and a `Part` of a tensor whose other boxes follow. Each part is released before the next one is
    computed. Raises: OSError.
    """
    written: list[str] = []
    for part in parts:
        written.append(f"{prefix}-part{len(written)}")
        boxes = {key: each for key, each in part.items() if isinstance(each, Part)}
        write(written[-1], {**{key: each for key, each in part.items() if key not in boxes}, **beside}, boxes)
        beside = {}
        del part, boxes
    merge(written, prefix)


def merge(prefixes: Sequence[str], prefix: str) -> None:
    """Merges other bundles of the directory into one bundle, `prefix`, and removes them. Raises: OSError.

    Cost: renames their data files, and writes one index.
    """
    import tensorflow as tf

    try:
        with tf.device("CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=False
            )
    except tf.errors.OpError as error:
        raise _as_os_error(error, prefix) from error


def entries(prefix: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns key -> (dtype name, shape). Raises: OSError: the bundle is missing or cannot be read."""
    import tensorflow as tf

    try:
        reader = tf.train.load_checkpoint(prefix)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise _as_os_error(error, prefix) from error
    dtypes = reader.get_variable_to_dtype_map()
    return {key: (dtypes[key].name, tuple(shape)) for key, shape in reader.get_variable_to_shape_map().items()}


def read(prefix: str, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Returns key -> CPU tensor, for key -> dtype name. Raises: OSError: a key is missing or of another dtype."""
    import tensorflow as tf

    tensors = _restored(prefix, [(key, "", tf.as_dtype(name)) for key, name in dtypes.items()])
    return dict(zip(dtypes, tensors))


def read_boxes(prefix: str, key: str, dtype: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> Any:
    """Returns the entries of boxes of a tensor, one box after the other: a vector. Raises: OSError, as `read`.

    Cost: memory for the boxes, and for one stored box at a time that overlaps them without being one of them. If the
        tensor was not written in parts, that stored box is the complete tensor, as for all dtypes but DTYPES_IN_PARTS.
    """
    import tensorflow as tf

    if dtype not in DTYPES_IN_PARTS:
        complete = read(prefix, {key: dtype})[key]
        pieces = [complete[tuple(slice(first, first + extent) for first, extent in box)] for box in boxes]
    else:  # one after the other: RestoreV2 reads several large tensors at once, in threads
        pieces = [_restored(prefix, [(key, _spec(shape, box), tf.as_dtype(dtype))])[0] for box in boxes]
    flat = [tf.reshape(each, [-1]) for each in pieces]
    return flat[0] if len(flat) == 1 else tf.concat(flat or [tf.zeros([0], dtype)], axis=0)


def _restored(prefix: str, entries: Sequence[tuple[str, str, Any]]) -> list[Any]:
    """Returns tensors, given (key, box as TensorFlow spells it, dtype) of each."""
    import tensorflow as tf

    if not entries:
        return []
    keys, specs, dtypes = zip(*entries)
    with tf.device("CPU:0"):
        try:
            return list(
                tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=keys, shape_and_slices=specs, dtypes=list(dtypes))
            )
        except tf.errors.OpError as error:
            raise _as_os_error(error, prefix) from error


def _spec(shape: Sequence[int], box: Box) -> str:
    """Returns the box as TensorFlow spells it: "10 4 0,5:-" is the first five rows of a tensor [10, 4], "" is all."""
    if box == tuple((0, size) for size in shape):
        return ""
    extents = ":".join("-" if each == (0, size) else f"{each[0]},{each[1]}" for each, size in zip(box, shape))
    return " ".join([*map(str, shape), extents])


def _unescaped(name: str) -> str:
    return re.sub(r"\.(\.|S)", lambda match: "." if match[1] == "." else "/", name)


@contextlib.contextmanager
def translated(what: str, path: Any, error_type: type[KerasDdlError]) -> Iterator[None]:
    """Converts an OSError in the block to `error_type`, with a remedy."""
    try:
        yield
    except OSError as error:
        raise error_type(durable.explain(error, what, path)) from error


def _as_os_error(error: Exception, prefix: str) -> OSError:
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.ENOTDIR):
        if os.strerror(number).lower() in text.lower():
            return OSError(number, os.strerror(number), prefix)
    return OSError(errno.EIO, text.splitlines()[0] if text else type(error).__name__, prefix)
