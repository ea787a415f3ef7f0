"""Writes and reads TensorFlow bundles (`prefix.index`, `prefix.data-*`) by key, with OSErrors."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from keras_ddl.errors import KerasDdlError
from keras_ddl.files import durable

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"  # ends every variable's key in an object-based TensorFlow checkpoint


def variable_key(*names: str) -> str:
    """Returns tf.train.Checkpoint's key of the variable at these attribute names."""
    return "/".join(name.replace(".", "..").replace("/", ".S") for name in names) + SUFFIX


def name_of(key: str) -> str:
    """Returns the last attribute name in a key of `variable_key`."""
    escaped = key.removesuffix(SUFFIX).rsplit("/", 1)[-1]
    return re.sub(r"\.(\.|S)", lambda match: "." if match[1] == "." else "/", escaped)


def write(prefix: str, tensors: Mapping[str, Any]) -> None:
    """Writes key -> tensor (or tf.Variable) as one bundle. Not atomic: write into a staging directory.

    Raises: OSError (also when TensorFlow reports a full disk or a missing permission).
    """
    import tensorflow as tf

    with tf.device("CPU:0"):
        values = [tf.convert_to_tensor(value) for value in tensors.values()]
        try:
            tf.raw_ops.SaveV2(
                prefix=prefix, tensor_names=list(tensors), shape_and_slices=[""] * len(values), tensors=values
            )
        except tf.errors.OpError as error:
            raise _as_os_error(error, prefix) from error


def write_in_parts(prefix: str, parts: Iterable[Mapping[str, Any]], beside: Mapping[str, Any]) -> None:
    """As `write`, part by part, with `beside` in the first; several parts give several data files.

    Each part is released before the next one is computed. Raises: OSError.
    """
    import tensorflow as tf

    written: list[str] = []
    for part in parts:
        written.append(f"{prefix}-part{len(written)}")
        write(written[-1], {**part, **beside})
        beside = {}
        del part
    try:
        # Renames the data files and writes one index; the directory of the parts is that of the result.
        with tf.device("CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=written, destination_prefix=prefix, delete_old_dirs=False)
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

    if not dtypes:
        return {}
    with tf.device("CPU:0"):
        try:
            tensors = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=list(dtypes),
                shape_and_slices=[""] * len(dtypes),
                dtypes=[tf.as_dtype(name) for name in dtypes.values()],
            )
        except tf.errors.OpError as error:
            raise _as_os_error(error, prefix) from error
    return dict(zip(dtypes, tensors))


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
