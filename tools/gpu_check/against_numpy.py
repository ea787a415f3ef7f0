"""Compares every collective, dtype and operation on GPU tensors of several sizes with NumPy. Runs in a rank."""

from __future__ import annotations

import itertools
import time

import numpy as np
import ranks
import torch
import torch.distributed as dist

import keras_ddl.torch  # noqa: F401  (registers the backend)

WHERE = ranks.device()
dist.init_process_group("ddl")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
DTYPES = {
    "float16": np.float16,
    "bfloat16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "int8": np.int8,
}
OPS = {"SUM": np.sum, "MIN": np.min, "MAX": np.max, "PRODUCT": np.prod, "AVG": np.mean}
COUNTS = (0, 1, 33, 1000, 300_007, 5_000_011)
count_of_checks = 0


def array_of(rank: int, count: int, dtype: str) -> np.ndarray:
    """Returns integers whose sums and products are exact in every dtype."""
    return ((np.arange(count) * 7 + 3 * rank) % 3 + 2 * (rank % 2)).astype(DTYPES[dtype])


def on_device(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(WHERE).to(getattr(torch, dtype))


def same(found: torch.Tensor, expected: np.ndarray, what: object) -> None:
    global count_of_checks
    count_of_checks += 1
    host = found.cpu()
    array = host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy()
    if not np.array_equal(array.astype(np.float64), expected.astype(np.float64)):
        wrong = np.flatnonzero(array.reshape(-1) != expected.reshape(-1))
        raise AssertionError(
            f"rank {RANK}: {what}: {wrong.size} wrong, first at {wrong[:5]}, "
            f"{array.reshape(-1)[wrong[:5]]} instead of {expected.reshape(-1)[wrong[:5]]}"
        )


def busy() -> None:
    """Occupies the stream, so that code that does not wait for it reads old values."""
    if WHERE.type == "cuda":
        torch.cuda._sleep(2_000_000)


begun = time.monotonic()
for dtype, count in itertools.product(DTYPES, COUNTS):
    if count > 1000 and dtype not in ("float32", "bfloat16", "int8"):
        continue
    everyone = np.stack([array_of(rank, count, dtype) for rank in range(SIZE)])
    kind = getattr(torch, dtype)
    for name, function in OPS.items():
        for later in (False, True):
            tensor = torch.zeros(count, dtype=kind, device=WHERE)
            value = on_device(everyone[RANK], dtype)
            busy()
            tensor.copy_(value)
            work = dist.all_reduce(tensor, getattr(dist.ReduceOp, name), async_op=later)
            if later:
                work.wait()
            expected = function(everyone.astype(np.float64), axis=0) if count else np.zeros(0)
            if name == "AVG" and not kind.is_floating_point:
                expected = np.trunc(expected)
            same(tensor, expected, ("all_reduce", name, dtype, count))
    for root in range(SIZE):
        tensor = on_device(everyone[RANK], dtype)
        dist.broadcast(tensor, root)
        same(tensor, everyone[root], ("broadcast", dtype, count))
    output = torch.empty(SIZE * count, dtype=kind, device=WHERE)
    dist.all_gather_into_tensor(output, on_device(everyone[RANK], dtype))
    same(output, everyone.reshape(-1), ("all_gather", dtype, count))
    whole = np.stack([array_of(rank, SIZE * count, dtype) for rank in range(SIZE)])
    for name in ("SUM", "MAX"):
        output = torch.empty(count, dtype=kind, device=WHERE)
        dist.reduce_scatter_tensor(output, on_device(whole[RANK], dtype), getattr(dist.ReduceOp, name))
        expected = OPS[name](whole.astype(np.float64), axis=0)[RANK * count : (RANK + 1) * count] if count else whole[0]
        same(output, expected, ("reduce_scatter", name, dtype, count))
    output = torch.empty(SIZE * count, dtype=kind, device=WHERE)
    dist.all_to_all_single(output, on_device(whole[RANK], dtype))
    same(output, whole.reshape(SIZE, SIZE, count)[:, RANK].reshape(-1), ("all_to_all", dtype, count))
# Many at once on a separate stream.
if WHERE.type == "cuda":
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensors = [torch.zeros(10_000 * i + 1, device=WHERE) for i in range(30)]
        works = []
        for i, tensor in enumerate(tensors):
            torch.cuda._sleep(200_000)
            tensor.fill_(RANK + i)
            works.append(dist.all_reduce(tensor, async_op=True))
        for i, (tensor, work) in enumerate(zip(tensors, works)):
            work.wait()
            same(tensor, np.full(tensor.numel(), sum(range(SIZE)) + SIZE * i), ("on a stream", i))
counts = dist.group.WORLD._engine.comm.native().count()
print(
    f"rank {RANK} of {SIZE} on {WHERE}: {count_of_checks} results equal NumPy's, {time.monotonic() - begun:.1f} s; "
    f"staged {counts['staged']}, by NCCL {counts['by_device']}"
)
dist.destroy_process_group()
