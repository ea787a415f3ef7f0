"""A model's state at one moment, ready to be written.

A snapshot begins as tensors that share the variables' memory, which costs no copy. They stay what they were: while
somebody holds a variable's tensor, TensorFlow's updates give the variable a new one instead (copy on write,
PrepareToUpdateVariable in tensorflow/core/kernels/training_op_helpers.h). That copy would lie in the step, so another
thread soon makes one of its own, in `Buffers`, memory that is kept from one checkpoint to the next, and lets go.
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
    """Host memory for the copies, by key; made at the first copy under a key, and used again."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, Any]] = {}  # key -> (tensor, its bytes as an array that may be written)

    def copy(self, key: str, tensor: Any) -> Any:
        """Returns a copy of a tensor; the next copy under this key overwrites it."""
        import numpy as np
        import tensorflow as tf

        source = _bytes_of(tensor)
        if source is None:
            return tensor.numpy() if tensor.dtype != tf.string else tensor
        held = self._held.get(key)
        if held is None or held[0].shape != tensor.shape or held[0].dtype != tensor.dtype:
            # Made by TensorFlow, whose op then writes it without another copy. Nobody else knows this tensor.
            with tf.device("CPU:0"):
                made = tf.raw_ops.Empty(shape=tf.shape(tensor), dtype=tensor.dtype, init=False)
            held = self._held[key] = (made, np.asarray(_Writable(_bytes_of(made))))
        if source.nbytes:
            np.copyto(held[1], source)
        return held[0]


class _Writable:
    """Lets NumPy write into the memory of an array that TensorFlow gave out for reading."""

    def __init__(self, array: Any) -> None:
        self.array = array
        known = array.__array_interface__
        self.__array_interface__ = {**known, "data": (known["data"][0], False)}


def _bytes_of(tensor: Any) -> Any:
    """Returns the bytes of a tensor in host memory as an array that shares them, or None."""
    import numpy as np
    import tensorflow as tf

    try:
        if tensor.dtype.name.startswith(("bfloat", "float8")):  # no dtypes of NumPy's own; their bits will do
            tensor = tf.bitcast(tensor, tf.uint16 if tensor.dtype.size == 2 else tf.uint8)
        return np.asarray(memoryview(tensor)).reshape(-1).view(np.uint8)
    except (TypeError, ValueError, BufferError, tf.errors.OpError):  # strings; on a device
        return None


@dataclass
class Snapshot:
    """What one checkpoint holds: bundle name -> key -> value, .npz file -> name -> array, file -> text, and entries for
    state.json."""

    bundles: dict[str, dict[str, Any]]
    archives: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    def copy_into(self, buffers: Buffers) -> None:
        """Puts copies in the place of the tensors that share memory with variables, one after the other."""
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
