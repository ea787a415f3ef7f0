"""A model's state at one moment, ready to be written.

A snapshot begins as tensors that share the variables' memory, without a copy. Their values do not change: while a
variable's tensor is referenced, TensorFlow's updates allocate a new one (copy on write, PrepareToUpdateVariable in
tensorflow/core/kernels/training_op_helpers.h). That copy would slow down a step, so another thread soon copies the
values to `Buffers`, memory that is reused for each checkpoint, and releases the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl.checkpoint import tensor_bundle as bundle

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
            # A TensorFlow tensor, because SaveV2 writes it without another copy. It is not shared with anybody.
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
    except (TypeError, ValueError, BufferError, tf.errors.OpError):  # strings; on a device
        return None


@dataclass
class Snapshot:
    """The contents of one checkpoint.

    Attributes:
        bundles: bundle name -> key -> value. archives: .npz file -> name -> array. texts: file -> text.
        record: entries of state.json.
    """

    bundles: dict[str, dict[str, Any]]
    archives: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    def copy_into(self, buffers: Buffers) -> None:
        """Replaces the tensors that share memory with variables by copies, one after the other."""
        for values in self.bundles.values():
            for key, tensor in values.items():
                values[key] = buffers.copy(key, tensor)

    def fill(self, folder: Path) -> dict[str, Any]:
        """Writes the files into `folder`; returns the entries for state.json. Raises: OSError."""
        for name, values in self.bundles.items():
            if values:
                bundle.write(str(folder / name), values)
        for name, arrays in self.archives.items():
            if arrays:
                import numpy as np

                np.savez(folder / name, **arrays)
        for name, text in self.texts.items():
            (folder / name).write_text(text)
        return self.record


def tensor_of(variable: Any) -> Any:
    """Returns the value of a Keras or TensorFlow variable as a tensor."""
    import tensorflow as tf

    value = variable.value
    return variable.read_value() if callable(value) else tf.convert_to_tensor(value)
