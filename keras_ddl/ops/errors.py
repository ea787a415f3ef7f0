"""Translates TensorFlow's errors from keras_ddl's ops to keras_ddl's errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from keras_ddl import errors
from keras_ddl.communicator.native import native_library
from keras_ddl.compat.tensorflow import tf

# A failure's text within TensorFlow's error, which adds names of nodes around it. The number identifies the failure in
# this process (native/tf/tf_handles.h); an assertion in a graph has none.
_OURS = re.compile(r"keras_ddl(?:\[([0-9a-f]+)\])?: (.*?)(?=\s*\[\[|\s*\n\s*\(\d+\) |\s*\[Op:|\s*$)", re.DOTALL)
_XLA = re.compile(r"Ddl[A-Z]\w+.*XLA_\w+_JIT|XLA_\w+_JIT.*Ddl[A-Z]", re.DOTALL)

_ESCAPED = re.compile(r"""\\(["'\\])""")  # Assert escapes quotes and backslashes


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Raises failures of keras_ddl's ops as keras_ddl errors, chained from TensorFlow's; others pass unchanged.

    Eager collectives do this themselves. An op in a tf.function can only fail with an error of TensorFlow
    (tf.errors.FailedPreconditionError and others): call the tf.function inside this context.
    """
    try:
        yield
    except tf.errors.OpError as error:
        translated = from_tensorflow(error)
        if translated is None:
            raise
        raise translated from error


def from_tensorflow(error: tf.errors.OpError) -> errors.KerasDdlError | None:
    """Returns the keras_ddl error for `error`; None if it does not come from keras_ddl's ops."""
    text = error.message or ""
    ours = _OURS.search(text)
    if ours is None:
        return jit_compile_error() if _XLA.search(text) else None
    number, message = ours.groups()
    if "assertion failed: [keras_ddl: " in text:  # an assertion in the graph, which fails on all ranks
        return errors.RankMismatchError(_ESCAPED.sub(r"\1", message.removesuffix("]")))
    found = native_library.failure_with_number(int(number, 16)) if number else None
    return found or errors.from_code(error.error_code, message)  # from another process, so the ranks are unknown


def jit_compile_error() -> errors.ConfigError:
    """Returns the error for a collective in a function that XLA compiles."""
    return errors.ConfigError(
        "XLA cannot compile a collective, because it waits for other ranks. Received: a collective inside "
        "tf.function(jit_compile=True) or model.compile(jit_compile=True). Use jit_compile=False for the function "
        "that communicates; functions it calls may keep jit_compile=True."
    )
