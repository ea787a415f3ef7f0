"""Calls the native ops with resolved names and translated errors. Only for use in this package."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import load_ops, tf, traced_for_xla
from keras_ddl.ops import names
from keras_ddl.ops.errors import jit_compile_error, translate_errors

# A float, because TensorFlow's fast path for eager ops refuses its own generated default, the integer -1.
NO_CHECK = -1.0


def _call(kind: str, function: str, name: str | None, comm: Communicator, *args: Any, **attrs: Any) -> Any:
    op: Callable[..., Any] = getattr(load_ops(), function)
    if traced_for_xla():
        raise jit_compile_error()
    key = names.resolve(name, kind, comm.prefix, comm.id)
    if "feedback" in attrs and attrs["feedback"] is None:
        # Unnamed eager calls share one name, but one call's rounding errors do not belong to the next.
        attrs["feedback"] = "" if name is None and tf.executing_eagerly() else key
    # The key may contain characters that TensorFlow does not allow in an op's name.
    attrs.update(tensor_name=key, communicator=comm.id, name=f"ddl_{kind}")
    if not tf.executing_eagerly():
        return op(*args, **attrs)
    # If main threads wait in different eager collectives, the core detects the deadlock within a second.
    attrs["blocking"] = threading.current_thread() is threading.main_thread()
    with translate_errors():
        return op(*args, **attrs)


def all_reduce(
    tensor: tf.Tensor, reduction: str, name: str | None, comm: Communicator, *, compression: str | None = None
) -> tf.Tensor:
    """Returns [...]: `tensor` reduced over all ranks."""
    attrs = {"reduction": reduction, "check": NO_CHECK, **_compression(compression)}
    return _call("all_reduce", "ddl_all_reduce", name, comm, tensor, **attrs)


def all_reduce_n(
    tensors: Sequence[tf.Tensor],
    reduction: str,
    name: str | None,
    comm: Communicator,
    *,
    mpi: bool = False,
    check: float = NO_CHECK,
    compression: str | None = None,
    feedback: str | None = None,
) -> list[tf.Tensor]:
    """Returns `tensors` (one dtype, at least one) reduced over all ranks in one request."""
    attrs = {"reduction": reduction, "mpi": mpi, "check": check, **_compression(compression, feedback)}
    reduced: list[tf.Tensor] = _call("all_reduce_n", "ddl_all_reduce_n", name, comm, tensors, **attrs)
    return reduced


def _compression(compression: str | None, feedback: str | None = None) -> dict[str, Any]:
    return {} if compression is None else {"compression": compression, "feedback": feedback}


def broadcast_n(
    tensors: Sequence[tf.Tensor],
    root: int,
    name: str | None,
    comm: Communicator,
    *,
    detail: str = "",
    fingerprint: int = 0,
) -> list[tf.Tensor]:
    """Returns rank `root`'s `tensors` (one dtype, at least one), sent in one request."""
    attrs = {"root": root, "detail": detail, "fingerprint": fingerprint}
    received: list[tf.Tensor] = _call("broadcast", "ddl_broadcast", name, comm, tensors, **attrs)
    return received


def reduce_scatter(tensor: tf.Tensor, reduction: str, name: str | None, comm: Communicator) -> tf.Tensor:
    """Returns this rank's rows of `tensor` reduced over all ranks."""
    return _call("reduce_scatter", "ddl_reduce_scatter", name, comm, tensor, reduction=reduction)


def all_gather(
    tensor: tf.Tensor, name: str | None, comm: Communicator, *, kind: str = "all_gather", all_ranks: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows of all ranks, [n, ...], and how many each rank had, int64 [size].

    Args:
        kind: the collective's name in a graph if `name` is None.
        all_ranks: fail if some ranks have joined (`join`). Otherwise ranks that have joined count as having no rows.
    """
    rows, counts = _call(kind, "ddl_all_gather", name, comm, tensor, all_ranks=all_ranks)
    return rows, counts


def all_to_all(
    tensor: tf.Tensor, splits: tf.Tensor, name: str | None, comm: Communicator
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows that all ranks sent to this one, [m_r, ...], and how many each rank sent, int64 [size]."""
    rows, counts = _call("all_to_all", "ddl_all_to_all", name, comm, tensor, splits)
    return rows, counts
