"""Groups gradients into buckets, and reduces them bucket by bucket.

A bucket is a list of tensors that one collective reduces together. Its tensors are not concatenated: the native op
takes the list. Buckets are numbered in the order in which backward finishes them, so that the first is sent while
earlier layers still compute (Li et al., PyTorch Distributed, VLDB 2020, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_ddl import config, ops
from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.gradients.bucket_size import BucketSize
from keras_ddl.gradients.sparse import all_reduce_slices


def plan_buckets(
    sizes: Sequence[int],
    dtypes: Sequence[str],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int | None = None,
) -> list[list[int]]:
    """Groups tensors into buckets.

    The backward pass computes the last tensors first, so buckets are filled from the end of the list. A bucket has one
    dtype, like a collective. A bucket may exceed the bound by its last tensor if it was less than a quarter full
    before: small tensors such as biases are not worth a collective of their own.

    Args:
        sizes: bytes of each tensor, in the order of the model's variables.
        dtypes: name of the dtype of each tensor.
        bucket_bytes: bound on the bytes of a bucket.
        first_bucket_bytes: bound on the first bucket of each dtype, which is small so that communication starts
            early; KERAS_DDL_FIRST_BUCKET_BYTES by default, and never more than bucket_bytes.
    Returns: the buckets in the order of submission; each a list of positions in `sizes`. Every position occurs once.
    """
    first_bound = config.get("FIRST_BUCKET_BYTES") if first_bucket_bytes is None else first_bucket_bytes
    first_bound = min(first_bound, bucket_bytes)

    buckets: list[list[int]] = []
    open_bucket: dict[str, int] = {}  # dtype -> index of the bucket that still takes tensors
    filled: dict[int, int] = {}
    limit: dict[int, int] = {}
    for position in reversed(range(len(sizes))):
        dtype = dtypes[position]
        index = open_bucket.get(dtype)
        full = index is not None and filled[index] + sizes[position] > limit[index]
        if index is None or (full and filled[index] * 4 >= limit[index]):
            limit[len(buckets)] = first_bound if index is None else bucket_bytes
            index = open_bucket[dtype] = len(buckets)
            buckets.append([])
            filled[index] = 0
        buckets[index].append(position)
        filled[index] += sizes[position]
    # A bucket is complete when its last tensor is: the order in which backward completes them.
    return sorted(buckets, key=lambda bucket: -min(bucket))


def all_reduce_in_buckets(tensors: Sequence[Any], *, op: str = "sum", name: str, bucket_size: BucketSize) -> list[Any]:
    """Reduces a list of gradients over all ranks, bucket by bucket.

    Args:
        tensors: dense tensors and tf.IndexedSlices, in the order of the variables; number, shapes and dtypes equal on
            all ranks (the number of rows of IndexedSlices may differ).
        op: as in `ops.all_reduce_n`; IndexedSlices take "sum" and "mean".
        name: name of the gradients, for error messages.
        bucket_size: the result of `bucket_size.agree`.
    Returns: the reduced tensors in the same order. IndexedSlices equal those that one process would compute
        from the global batch.
    Raises: RankMismatchError: the ranks' lists differ.
    Cost: one all-reduce per bucket, and `all_reduce_slices` for IndexedSlices.
    """
    result = list(tensors)
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            result[i] = all_reduce_slices(tensor, op=op, name=f"{name}/sparse_{i}")

    dense_tensors = [tensors[i] for i in dense]
    for i, tensor in zip(
        dense, all_reduce_planned(dense_tensors, plan_for(dense_tensors, bucket_size), op=op, name=name)
    ):
        result[i] = tensor
    return result


def plan_for(tensors: Sequence[tf.Tensor], bucket_size: BucketSize) -> list[list[int]]:
    """Returns the buckets of dense tensors that are in the order of the variables, as `plan_buckets`."""
    # An unknown dimension (never in gradients of variables) counts as 1: buckets must not depend on the batch.
    sizes = [tensor.dtype.size * _static_elements(tensor.shape) for tensor in tensors]
    dtypes = [tensor.dtype.name for tensor in tensors]
    return plan_buckets(sizes, dtypes, bucket_bytes=bucket_size.bound(sum(sizes)))


def all_reduce_planned(
    tensors: Sequence[tf.Tensor],
    plan: Sequence[Sequence[int]],
    *,
    op: str,
    name: str,
    comm: Communicator | None = None,
) -> list[tf.Tensor]:
    """Returns dense tensors reduced over the ranks of `comm`, by one all-reduce per bucket of `plan`. COLLECTIVE."""
    result = list(tensors)
    for number, bucket in enumerate(plan):
        reduced = ops.all_reduce_n([tensors[i] for i in bucket], op=op, name=f"{name}/bucket_{number}", comm=comm)
        for i, tensor in zip(bucket, reduced):
            result[i] = tensor
    return result


def _static_elements(shape: tf.TensorShape) -> int:
    elements = 1
    for dimension in shape:
        elements *= dimension or 1
    return elements
