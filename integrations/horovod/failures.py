"""Errors that are both keras_ddl's and the TensorFlow errors that Horovod's scripts expect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.errors import ConfigError, RankMismatchError

_Function = TypeVar("_Function", bound=Callable[..., Any])


class InvalidArgumentError(ConfigError, tf.errors.InvalidArgumentError):
    """A ConfigError that Horovod's ops raise as tf.errors.InvalidArgumentError."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


class UnsupportedError(ConfigError, NotImplementedError):
    """A ConfigError where Horovod raises NotImplementedError or RuntimeError, its base class."""


def as_tensorflow_errors(function: _Function) -> _Function:
    """Wraps `function` so that RankMismatchError becomes tf.errors.FailedPreconditionError with the same text.

    In a tf.function, ops can only fail with TensorFlow's errors.
    """

    @do_not_convert
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RankMismatchError as error:
            raise tf.errors.FailedPreconditionError(None, None, str(error)) from error

    return cast(_Function, call)
