"""keras_ddl's errors where Horovod's scripts expect TensorFlow's."""

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
    """A ConfigError where Horovod raises NotImplementedError, or the RuntimeError that this is."""


def as_tensorflow_errors(function: _Function) -> _Function:
    """Returns `function`, with RankMismatchError raised as tf.errors.FailedPreconditionError of the same text.

    So it is in a tf.function anyway, where an op can fail with an error of TensorFlow only.
    """

    @do_not_convert
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RankMismatchError as error:
            raise tf.errors.FailedPreconditionError(None, None, str(error)) from error

    return cast(_Function, call)
