"""Gradients of the collectives: of the sum of all ranks' losses with respect to this rank's input.

Every rank takes part in every gradient, in a collective named after the forward one. With y a collective of all x_s,
L_r the loss of rank r and g_r = dL_r/dy_r, rank s gets sum_r (dy_r/dx_s)^T g_r: the transpose of the forward
collective, in the same communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import register_gradient, tf
from keras_ddl.ops import adaptive_sum, names, raw


def _text(op: Any, attribute: str) -> str:
    value = op.get_attr(attribute)
    return value.decode() if isinstance(value, bytes) else value


def _comm(op: Any) -> Communicator:
    return communicator.communicator_with_id(op.get_attr("communicator"))


def _name(op: Any) -> str:
    return names.derived(_text(op, "tensor_name").removeprefix(_comm(op).prefix), "grad")


def _dense(gradients: Sequence[Any], outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.zeros_like(y) if g is None else tf.convert_to_tensor(g) for g, y in zip(gradients, outputs)]


@register_gradient("DdlAllReduce")
def _all_reduce(op: Any, gradient: Any) -> tf.Tensor:
    return _reduced(op, [gradient])[0]


@register_gradient("DdlAllReduceN")
def _all_reduce_n(op: Any, *gradients: Any) -> list[tf.Tensor]:
    return _reduced(op, gradients)


def _reduced(op: Any, gradients: Sequence[Any]) -> list[tf.Tensor]:
    inputs, outputs = list(op.inputs), list(op.outputs)
    gradients = _dense(gradients, outputs)
    reduction, name, comm = _text(op, "reduction"), _name(op), _comm(op)
    if reduction in ("sum", "mean", "avg"):
        return raw.all_reduce_n(gradients, reduction, name, comm, mpi=bool(op.get_attr("mpi")))
    if reduction == "adasum":
        return adaptive_sum.gradients(inputs, gradients, name, comm)
    if reduction == "product":
        totals = raw.all_reduce_n(gradients, "sum", name, comm)
        return [total * _product_of_others(x, name, comm) for total, x in zip(totals, inputs)]
    # Ranks with the extreme value share its gradient, as equal elements do in tf.reduce_max.
    hits = [tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(inputs, outputs)]
    both = raw.all_reduce_n([*gradients, *hits], "sum", name, comm)
    totals, counts = both[: len(hits)], both[len(hits) :]
    return [total * hit / count for total, hit, count in zip(totals, hits, counts)]


def _product_of_others(tensor: tf.Tensor, name: str, comm: Communicator) -> tf.Tensor:
    """Returns the product over all other ranks, of the shape of `tensor`. Cost: size * nbytes of memory and traffic.

    Dividing the product of all ranks by this rank's factor would be cheaper, but wrong at zeros, and where the product
    overflows or underflows.
    """
    factors, _ = raw.all_gather(tensor[tf.newaxis], names.derived(name, "factors"), comm, all_ranks=True)
    return tf.reduce_prod(tf.concat([factors[: comm.rank], factors[comm.rank + 1 :]], 0), 0)


@register_gradient("DdlBroadcast")
def _broadcast(op: Any, *gradients: Any) -> list[tf.Tensor]:
    comm = _comm(op)
    totals = raw.all_reduce_n(_dense(gradients, op.outputs), "sum", _name(op), comm)
    # The zeros depend on the collective, because otherwise TensorFlow would skip it here while other ranks wait.
    at_root = comm.rank == op.get_attr("root")
    return [tf.where(at_root, total, tf.zeros_like(total)) for total in totals]


@register_gradient("DdlReduceScatter")
def _reduce_scatter(op: Any, gradient: Any) -> tf.Tensor:
    (x,), (y,) = op.inputs, op.outputs
    reduction, name, comm = _text(op, "reduction"), _name(op), _comm(op)
    total, _ = raw.all_gather(tf.convert_to_tensor(gradient), name, comm, all_ranks=True)
    total.set_shape(x.shape)
    if reduction == "sum":
        return total
    if reduction in ("mean", "avg"):
        return total / tf.cast(comm.size, total.dtype)
    if reduction == "product":
        return total * _product_of_others(x, name, comm)
    extremes, _ = raw.all_gather(y, names.derived(name, "extremes"), comm, all_ranks=True)
    hits = tf.cast(tf.equal(x, extremes), x.dtype)
    return total * hits / raw.all_reduce(hits, "sum", names.derived(name, "hits"), comm)


@register_gradient("DdlAllGather")
def _all_gather(op: Any, gradient: Any, _rows_gradient: Any) -> tf.Tensor:
    # Not reduce_scatter, which divides rows evenly, because ranks may gather different numbers of rows.
    (x,), (_, rows) = op.inputs, op.outputs
    comm = _comm(op)
    total = raw.all_reduce(tf.convert_to_tensor(gradient), "sum", _name(op), comm)
    start = tf.reduce_sum(rows[: comm.rank])
    return tf.reshape(total[start : start + rows[comm.rank]], tf.shape(x))


@register_gradient("DdlAllToAll")
def _all_to_all(op: Any, gradient: Any, _received_gradient: Any) -> tuple[tf.Tensor, None]:
    # The gradient of each row goes back to the rank that sent it.
    (x, _), (_, received) = op.inputs, op.outputs
    returned, _ = raw.all_to_all(tf.convert_to_tensor(gradient), received, _name(op), _comm(op))
    return tf.ensure_shape(returned, x.shape), None
