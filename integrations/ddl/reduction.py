"""Reduces gradients over all ranks once: an optimizer does not reduce gradients that the script has already reduced.

`gradients.reduced` tracks reduced gradients. In eager mode it only recognizes the reduced tensors themselves. A
tensor computed from a mean is averaged again, which changes nothing and costs a reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ddl import dump, job
from keras_ddl.gradients import reduced
from keras_ddl.gradients.buckets import all_reduce_in_buckets


def bcast(init_val: Any) -> tf.Tensor:
    """Returns rank 0's `init_val` on every rank, as the initial value of a variable. COLLECTIVE.

    Args:
        init_val: a tensor or a value for tf.convert_to_tensor, of one shape and dtype on all ranks.
    Raises: NotInitializedError: there is no job. RankMismatchError, in a Session tf.errors.FailedPreconditionError:
        ranks differ in shape or dtype.
    """
    job.require_ranks("bcast()")
    return ops.broadcast(init_val, name=None if tf.executing_eagerly() else "ddl/bcast")


def allreduce_n(grads: Sequence[Any], average: bool = True) -> list[Any]:
    """Returns the gradients, averaged (or summed) over all ranks, in as few reductions as DDL_GROUP_SIZE allows.

    Args:
        grads: tensors, tf.IndexedSlices and None, the same list on every rank. For gradients that an optimizer's
            compute_gradients has averaged, the values before averaging are taken.
    Returns: a list of the same length, with None in the same places.
    Raises: as `bcast`.
    """
    job.require_ranks("allreduce_n()")
    return _all_reduce([reduced.before(gradient) for gradient in grads], average)


def grads_reduce(grads_and_vars: Iterable[tuple[Any, Any]], average: bool = True) -> list[tuple[Any, Any]]:
    """Returns the pairs with gradients reduced by `allreduce_n`, which the optimizer does not reduce again."""
    pairs = list(grads_and_vars)
    job.require_ranks("grads_reduce()")
    gradients = allreduce_n([gradient for gradient, _ in pairs], average)
    return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs)]


def averaged(grads: Sequence[Any]) -> list[Any]:
    """Returns the gradients that an optimizer applies: averaged over ranks, unless a part is already reduced."""
    there = [i for i, gradient in enumerate(grads) if gradient is not None]
    todo = [i for i, done in zip(there, reduced.are_reduced(grads[i] for i in there)) if not done]
    result = list(grads)
    for i, gradient in zip(todo, _all_reduce([grads[i] for i in todo], average=True)):
        result[i] = gradient
    return result


def _all_reduce(grads: Sequence[Any], average: bool) -> list[Any]:
    there = [i for i, gradient in enumerate(grads) if gradient is not None]
    dense = [tf.convert_to_tensor(g) if not isinstance(g, tf.IndexedSlices) else g for g in (grads[i] for i in there)]
    result: list[Any] = [None] * len(grads)
    if not dense:
        return result

    def reduce(some: Sequence[Any]) -> list[Any]:
        return all_reduce_in_buckets(
            some, op="mean" if average else "sum", name="ddl/gradients", bucket_size=job.bucket_size()
        )

    if job.options().dbg_level > 1:
        job.say(f"reduces {len(dense)} gradients")
    results = dump.timed(reduce, dense) if job.options().dump_iter else reduce(dense)
    for i, before, after in zip(there, dense, results):
        reduced.note(before, after)
        result[i] = after
    return result
