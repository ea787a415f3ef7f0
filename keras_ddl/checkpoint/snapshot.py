"""Takes a snapshot of a model's state, ready to be written.

A snapshot begins as tensors that share the variables' memory, without a copy. Their values do not change: while a
variable's tensor is referenced, TensorFlow's updates allocate a new one (copy on write, PrepareToUpdateVariable in
tensorflow/core/kernels/training_op_helpers.h). That copy would slow down a step, so another thread soon copies the
values to `Buffers`, memory that is reused for each checkpoint, and releases the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.files import durable

WEIGHTS = "weights"
OPTIMIZER = "optimizer"
GOLDEN = "golden.npz"


class Buffers:
    """Host memory for copies, by key; allocated at the first copy of a key, and reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[Any, Any]] = {}  # key -> (tensor, its bytes as a writable array)

    def copy(self, key: str, tensor: Any) -> Any:
        """Returns a copy of a tensor; the next copy under this key overwrites it."""
        import numpy as np
        import tensorflow as tf

        source = _bytes_of(tensor)
        if source is None:
            return tensor.numpy() if tensor.dtype != tf.string else tensor
        buffer = self._buffers.get(key)
        if buffer is None or buffer[0].shape != tensor.shape or buffer[0].dtype != tensor.dtype:
            # A TensorFlow tensor, because SaveV2 writes it without another copy. Nothing else shares its memory.
            with tf.device("CPU:0"):
                empty = tf.raw_ops.Empty(shape=tf.shape(tensor), dtype=tensor.dtype, init=False)
            buffer = self._buffers[key] = (empty, np.asarray(_Writable(_bytes_of(empty))))
        if source.nbytes:
            np.copyto(buffer[1], source)
        return buffer[0]


class _Writable:
    """Gives NumPy write access to the memory of a read-only array of TensorFlow."""

    def __init__(self, array: Any) -> None:
        self.array = array
        known = array.__array_interface__
        self.__array_interface__ = {**known, "data": (known["data"][0], False)}


def _bytes_of(tensor: Any) -> Any:
    """Returns the bytes of a tensor in host memory as an array that shares the memory, or None."""
    import numpy as np
    import tensorflow as tf

    try:
        if tensor.dtype.name.startswith(("bfloat", "float8")):  # NumPy lacks these dtypes; copy their bits
            tensor = tf.bitcast(tensor, tf.uint16 if tensor.dtype.size == 2 else tf.uint8)
        return np.asarray(memoryview(tensor)).reshape(-1).view(np.uint8)
    except (TypeError, ValueError, BufferError, tf.errors.OpError):  # a tensor of strings, or on a device
        return None


@dataclass
class Snapshot:
    """The contents of one checkpoint, or of one rank's part of it.

    Attributes:
        bundles: bundle name -> key -> value.
        parts: bundle name -> key -> part of a tensor.
        archives: name of an .npz file -> name -> array.
        texts: name of a file -> text.
        record: entries of state.json.
    """

    bundles: dict[str, dict[str, Any]]
    parts: dict[str, dict[str, bundle.Part]] = field(default_factory=dict)
    archives: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    def copy_into(self, buffers: Buffers) -> None:
        """Replaces the tensors that share memory with variables by copies, one after the other."""
        for values in self.bundles.values():
            for key, tensor in values.items():
                values[key] = buffers.copy(key, tensor)
        for parts in self.parts.values():
            for key, part in parts.items():
                parts[key] = replace(part, values=buffers.copy(key, part.values))

    def fill(self, folder: Path) -> dict[str, Any]:
        """Writes the files into `folder`; returns the entries for state.json. Raises: OSError."""
        self.write_bundles(folder)
        return self.write_files(folder)

    def write_bundles(self, folder: Path, writer: int | None = None) -> list[str]:
        """Writes the bundles. Returns the names of those that are not empty. Raises: OSError.

        `writer`: the number of this writer, if several write their parts into the folder; for `merge_bundles`.
        """
        names = [name for name in {**self.bundles, **self.parts} if self.bundles.get(name) or self.parts.get(name)]
        for name in names:
            path = str(folder / _name_of(name, writer))
            bundle.write(path, self.bundles.get(name, {}), self.parts.get(name))
        return names

    def write_files(self, folder: Path) -> dict[str, Any]:
        """Writes everything except the bundles; returns the entries for state.json. Raises: OSError."""
        for name, arrays in self.archives.items():
            if arrays:
                import numpy as np

                np.savez(folder / name, **arrays)
        for name, text in self.texts.items():
            (folder / name).write_text(text)
        return self.record


def by_bundle(parts: Mapping[str, bundle.Part | None]) -> dict[str, dict[str, bundle.Part]]:
    """Sorts parts, whose keys begin with the name of their bundle, by bundle. None: this rank writes no part."""
    sorted_parts: dict[str, dict[str, bundle.Part]] = {WEIGHTS: {}, OPTIMIZER: {}}
    for key, part in parts.items():
        if part is not None:
            sorted_parts[key.partition("/")[0]][key] = part
    return sorted_parts


def merge_bundles(folder: Path, written: Mapping[int, Sequence[str]]) -> None:
    """Merges the bundles of several writers (`Snapshot.write_bundles`): writer's number -> names of its bundles."""
    for name in dict.fromkeys(name for names in written.values() for name in names):
        written_bundles = [str(folder / _name_of(name, each)) for each in sorted(written) if name in written[each]]
        bundle.merge(written_bundles, str(folder / name))


def sync_bundles(folder: Path, names: Sequence[str], writer: int) -> None:
    """Waits until the bundles of one of several writers are on disk. Raises: OSError."""
    for name in names:
        for path in folder.glob(f"{_name_of(name, writer)}.*"):
            durable.sync_file(path)


def _name_of(name: str, writer: int | None) -> str:
    return name if writer is None else f"{name}-rank{writer:05d}"


def tensor_of(variable: Any) -> Any:
    """Returns the value of a Keras or TensorFlow variable as a tensor."""
    import tensorflow as tf

    value = variable.value
    return variable.read_value() if callable(value) else tf.convert_to_tensor(value)
