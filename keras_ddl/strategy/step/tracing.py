"""Whether this thread traces a step as one process would, and for whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from keras_ddl.compat.context import setting
from keras_ddl.compat.strategies import outside_strategies

_tracing: ContextVar[bool] = ContextVar("keras_ddl_tracing", default=False)
_strategy_of_step: ContextVar[Any] = ContextVar("keras_ddl_strategy_of_step", default=None)


def is_traced() -> bool:
    """Whether this thread is tracing, or running, a step as one process would."""
    return _tracing.get()


def strategy_of_step() -> Any:
    """Returns the Strategy whose step this thread traces, or None."""
    return _strategy_of_step.get()


def tracing_for(strategy: Any) -> AbstractContextManager[None]:
    """Returns a context in which a step is traced, to be cut for the ranks of `strategy`."""
    return setting(_strategy_of_step, strategy)


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, the program's code means what it means in one process."""
    with setting(_tracing, True), outside_strategies():
        yield
