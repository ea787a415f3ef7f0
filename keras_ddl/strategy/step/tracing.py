"""Whether this thread traces a step as one process would, and for whom."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.thread_value import ThreadValue

_tracing = ThreadValue(False)
_strategy_of_step = ThreadValue()


def is_traced() -> bool:
    """Whether this thread is tracing, or running, a step as one process would."""
    return _tracing.get()


def strategy_of_step() -> Any:
    """Returns the Strategy whose step this thread traces, or None."""
    return _strategy_of_step.get()


def tracing_for(strategy: Any) -> Any:
    """Returns a context in which a step is traced, to be cut for the ranks of `strategy`."""
    return _strategy_of_step.set_to(strategy)


def as_one_process() -> Any:
    """Returns a context in which the program's code means what it means in one process."""
    return _AsOneProcess()


class _AsOneProcess:
    def __enter__(self) -> None:
        self._contexts = (_tracing.set_to(True), tf_compat.outside_strategies())
        for each in self._contexts:
            each.__enter__()

    def __exit__(self, *error: Any) -> None:
        for each in reversed(self._contexts):
            each.__exit__(*error)
