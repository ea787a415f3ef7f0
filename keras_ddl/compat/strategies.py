"""Private interfaces of tf.distribute: strategies, their contexts, and their variables."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from keras_ddl.compat.tensorflow import UpdateContext, tf

ReplicaContext: Any = tf.distribute.ReplicaContext
StrategyExtendedV1: Any = tf.compat.v1.distribute.StrategyExtended


@contextlib.contextmanager
def outside_strategies() -> Iterator[None]:
    """Leaves all tf.distribute strategies within the block, even in a scope, so variables are plain."""
    graph = tf.compat.v1.get_default_graph()
    creators = graph._variable_creator_stack
    scope_creators = [each for each in creators if each[1].__module__ == tf.distribute.Strategy.__module__]
    if scope_creators:
        graph._variable_creator_stack = [each for each in creators if each not in scope_creators]
    try:
        with _default_replica_context() if tf.distribute.has_strategy() else contextlib.nullcontext():
            yield
    finally:
        if scope_creators:
            graph._variable_creator_stack = creators


def process_variable(name: str, shape: Sequence[int] = ()) -> tf.Variable:
    """Makes an int64 variable of this process, on the CPU and outside of any tf.function and strategy."""
    with tf.init_scope(), tf.device("CPU:0"), outside_strategies():
        return tf.Variable(tf.zeros(shape, tf.int64), trainable=False, name=f"keras_ddl_{name}")


@functools.cache
def _default_replica_context() -> Any:
    contexts: list[Any] = []
    # Scopes belong to threads, so a new thread is outside of all scopes.
    thread = threading.Thread(target=lambda: contexts.append(tf.distribute.get_replica_context()))
    thread.start()
    thread.join()
    return contexts[0]


def is_none(strategy: Any) -> bool:
    """Whether a tf.distribute strategy is the default one, outside of all scopes."""
    return strategy is None or strategy is _default_replica_context().strategy


def container_strategy(extended: Any) -> Any:
    return extended._container_strategy()


def primary_variable(value: Any) -> Any:
    """Returns the first of the variables behind a mirrored variable of tf.distribute; any other variable unchanged."""
    return getattr(value, "_primary", value)
