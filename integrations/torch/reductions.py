"""Collectives that reduce, for the operations and dtypes that the engine supports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from keras_ddl.communicator.native import requests
from keras_ddl.torch import memory
from keras_ddl.torch.engine import Engine
from keras_ddl.torch.work import DdlWork
from torch.distributed import ReduceOp


def all_reduce(engine: Engine, call: str, tensors: Sequence[torch.Tensor], op: ReduceOp, waits: bool) -> DdlWork:
    """Reduces each of `tensors` in place, with one collective per dtype."""
    memory.check(call, tensors)
    kinds: dict[tuple[str, int], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(memory.reduction(call, op, tensor), []).append(tensor)
    works = [
        engine.run(
            requests.ALL_REDUCE,
            dtype,
            [memory.place(each, each, each.numel()) for each in some],
            some,
            agree=memory.agreement(call, some),
            waits=waits and len(kinds) == 1,
            op=number,
        )
        for (dtype, number), some in kinds.items()
    ]
    return engine.together(works, tensors)


def reduce_scatter_single(
    engine: Engine, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, waits: bool
) -> DdlWork:
    """Reduces `tensor` and leaves each rank its chunk; chunks are of equal size, in the order of ranks."""
    call = "reduce_scatter_tensor"
    memory.check(call, (output, tensor), ordered=True)
    memory.check_multiple(call, tensor, output, engine)
    dtype, number = memory.reduction(call, op, tensor)
    return engine.run(
        requests.REDUCE_SCATTER,
        dtype,
        [memory.place(tensor, output, tensor.numel())],
        [output],
        keep=tensor,
        agree=memory.agreement(call, [tensor]),
        waits=waits,
        op=number,
        row_count=output.numel(),
        rows=engine.size,
    )


def reduce_scatter(
    engine: Engine, output: torch.Tensor, pieces: Sequence[torch.Tensor], op: ReduceOp, waits: bool
) -> DdlWork:
    """Reduces `pieces[r]` for each rank r; their sizes may differ."""
    call = "reduce_scatter"
    memory.check(call, (output, *pieces), ordered=True)
    memory.check_one_each(call, pieces, engine)
    if all(each.numel() == output.numel() for each in pieces):
        return reduce_scatter_single(engine, output, torch.cat([each.reshape(-1) for each in pieces]), op, waits)
    # Reduce each piece separately, and keep one.
    sums = [output if rank == engine.rank else torch.empty_like(each) for rank, each in enumerate(pieces)]
    for total, piece in zip(sums, pieces):
        total.copy_(piece)
    work = engine.together([all_reduce(engine, call, [each], op, False) for each in sums], [output])
    if waits:
        work.wait()
    return work
