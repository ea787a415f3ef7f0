"""Checks and groups lists of variables for `broadcast_variables`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from keras_ddl.communicator.comparison import digest, require_equal_lists
from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

T = TypeVar("T")


def unwrap(variables: Sequence[Any]) -> list[tf.Variable]:
    """Returns the tf.Variable of each tf.Variable or keras.Variable.

    Raises:
        ConfigError: an object of another type, or a variable that is not built yet.
    """
    inners = []
    for variable in variables:
        inner = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
        if not isinstance(inner, tf.Variable):
            raise ConfigError(
                "variables must be tf.Variable or keras.Variable, and built. "
                f"Received: {type(variable).__name__} {getattr(variable, 'path', '')!r}. Build the model first."
            )
        inners.append(inner)
    return inners


def _specs(variables: Sequence[tf.Variable]) -> list[str]:
    return [f"{v.dtype.name}{v.shape.as_list()} {v.name}" for v in variables]


def _shapes(variables: Sequence[tf.Variable]) -> list[str]:
    # Leave out names, because Keras numbers them per process, and a rank may have built another model before.
    return [f"{v.dtype.name}{v.shape.as_list()}" for v in variables]


def describe(variables: Sequence[tf.Variable]) -> str:
    return f"{len(variables)} variables: " + ", ".join(_specs(variables)[:8])


def fingerprint(variables: Sequence[tf.Variable]) -> int:
    """Returns a 63-bit hash of the number, order, shapes and dtypes of `variables`."""
    return int.from_bytes(digest("\n".join(_shapes(variables)).encode())[:8], "little") >> 1


def check_equal_on_all_ranks(variables: Sequence[tf.Variable], comm: Communicator) -> None:
    """Checks that all ranks of `comm` have equally many variables, with equal shapes and dtypes. COLLECTIVE, eager.

    Raises:
        RankMismatchError: on every rank; the message names the first difference.
    """
    require_equal_lists(
        _shapes(variables),
        "broadcast_variables/shapes",
        "All ranks must have the same variables in the same order.",
        "Build the same model on every rank.",
        entry="variable",
        texts=_specs(variables),
        comm=comm,
    )


def groups(variables: Sequence[tf.Variable], limit_bytes: int) -> Iterator[list[tf.Variable]]:
    """Yields groups of variables of one dtype. A group has at most `limit_bytes`, or is a single larger variable."""
    by_dtype: dict[tf.DType, list[tf.Variable]] = {}
    for variable in variables:
        by_dtype.setdefault(variable.dtype, []).append(variable)
    for dtype, same_dtype in by_dtype.items():
        nbytes = [(variable.shape.num_elements() or 0) * dtype.size for variable in same_dtype]
        yield from in_groups(same_dtype, nbytes, limit_bytes)


def in_groups(items: Iterable[T], nbytes: Iterable[int], limit_bytes: int) -> Iterator[list[T]]:
    """Yields the items in groups. A group has at most `limit_bytes`, or is a single larger item.

    nbytes: the size of each item.
    """
    group: list[T] = []
    group_bytes = 0
    for item, size in zip(items, nbytes):
        if group and group_bytes + size > limit_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(item)
        group_bytes += size
    if group:
        yield group
