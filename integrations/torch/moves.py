"""Collectives that move elements of any dtype without reducing them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import torch
from keras_ddl.communicator.native import requests
from keras_ddl.communicator.native.native_library import Place
from keras_ddl.communicator.native.started import Started
from keras_ddl.errors import ConfigError, RankMismatchError
from keras_ddl.torch import memory
from keras_ddl.torch.engine import Engine
from keras_ddl.torch.work import DdlWork

Tensors = Sequence[torch.Tensor]


def broadcast(engine: Engine, tensor: torch.Tensor, root: int, waits: bool) -> DdlWork:
    """Broadcasts the tensor of rank `root`, in place."""
    memory.check("broadcast", [tensor])
    dtype, count = memory.as_is(tensor)
    return engine.run(
        requests.BROADCAST,
        dtype,
        [memory.place(tensor, tensor, count)],
        [tensor],
        agree=memory.agreement("broadcast", [tensor]),
        waits=waits,
        root=root,
    )


def all_gather_single(engine: Engine, output: torch.Tensor, tensor: torch.Tensor, waits: bool) -> DdlWork:
    """Fills `output` with the tensors of all ranks, one after another."""
    call = "all_gather_into_tensor"
    memory.check(call, (output, tensor), ordered=True)
    memory.check_multiple(call, output, tensor, engine)
    count = memory.as_is(tensor)[1]
    return _gather(engine, tensor, output, count, [output], memory.agreement(call, [tensor]), waits)


def all_gather(engine: Engine, outputs: Tensors, tensor: torch.Tensor, waits: bool) -> DdlWork:
    """Copies the tensor of rank r to `outputs[r]`; ranks may have different numbers of elements."""
    call = "all_gather"
    memory.check(call, (*outputs, tensor))
    memory.check_one_each(call, (*outputs,), engine, tensor.dtype)
    flat = tensor.new_empty(sum(each.numel() for each in outputs))
    tensor = tensor.contiguous()
    equal = all(each.numel() == tensor.numel() for each in outputs)
    count = memory.as_is(tensor)[1] if equal else 1
    agree = memory.agreement(call, [tensor]) if equal else memory.agreement_on_dtype(call, tensor)
    finish = functools.partial(_split_into, outputs, flat)
    return _gather(engine, tensor, flat, count, outputs, agree, waits, finish)


def _gather(
    engine: Engine,
    tensor: torch.Tensor,
    output: torch.Tensor,
    row_count: int,
    results: Any,
    agree: Any,
    waits: bool,
    finish: Callable[..., None] | None = None,
) -> DdlWork:
    dtype, count = memory.as_is(tensor)
    row_count = max(row_count, 1)
    place = Place(out=output.data_ptr(), row_count=row_count, rows=memory.as_is(output)[1] // row_count)
    return engine.run(
        requests.ALL_GATHER,
        dtype,
        [memory.place(tensor, None, count)],
        results,
        keep=(tensor, output),
        agree=agree,
        waits=waits,
        finish=finish,
        row_count=row_count,
        rows=count // row_count,
        place=place,
    )


def all_to_all_single(
    engine: Engine,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    waits: bool,
) -> DdlWork:
    """Sends each rank its rows of `tensor`, and fills `output` with the received rows, in the order of ranks."""
    call = "all_to_all_single"
    memory.check(call, (output, tensor), ordered=True)
    mine, theirs = _split(engine, tensor, input_splits), _split(engine, output, output_splits)
    return _exchange(engine, call, [output], tensor, mine, theirs, waits)


def all_to_all(engine: Engine, outputs: Tensors, tensors: Tensors, waits: bool) -> DdlWork:
    """Sends `tensors[r]` to rank r, and receives `outputs[r]` from it."""
    call = "all_to_all"
    memory.check(call, outputs, ordered=True)
    memory.check(call, tensors)
    memory.check_one_each(call, outputs, engine)
    memory.check_one_each(call, tensors, engine, outputs[0].dtype)
    flat = torch.cat([each.reshape(-1) for each in tensors])
    mine, theirs = [each.numel() for each in tensors], [each.numel() for each in outputs]
    return _exchange(engine, call, outputs, flat, mine, theirs, waits)


def gather(engine: Engine, outputs: Tensors, tensor: torch.Tensor, root: int, waits: bool) -> DdlWork:
    """Copies the tensor of each rank r to `outputs[r]` of rank `root`."""
    if engine.rank == root:
        memory.check_one_each("gather", outputs, engine, tensor.dtype)
    memory.check("gather", outputs, ordered=True)
    memory.check("gather", [tensor])
    mine = [tensor.numel() if rank == root else 0 for rank in range(engine.size)]
    theirs = [each.numel() for each in outputs] or [0] * engine.size
    return _exchange(engine, f"gather to rank {root}", outputs, tensor.reshape(-1), mine, theirs, waits)


def scatter(engine: Engine, output: torch.Tensor, pieces: Tensors, root: int, waits: bool) -> DdlWork:
    """Copies `pieces[r]` of rank `root` to `output` of each rank r."""
    if engine.rank == root:
        memory.check_one_each("scatter", pieces, engine, output.dtype)
    memory.check("scatter", pieces)
    memory.check("scatter", [output], ordered=True)
    flat = torch.cat([each.reshape(-1) for each in pieces]) if pieces else output.new_empty(0)
    mine = [each.numel() for each in pieces] or [0] * engine.size
    theirs = [output.numel() if rank == root else 0 for rank in range(engine.size)]
    return _exchange(engine, f"scatter from rank {root}", [output], flat, mine, theirs, waits)


def _exchange(
    engine: Engine,
    call: str,
    results: Any,
    flat: torch.Tensor,
    mine: Sequence[int],
    theirs: Sequence[int],
    waits: bool,
) -> DdlWork:
    """Sends `mine[r]` elements of `flat` to rank r, and receives `theirs[r]` elements from it into `results`."""
    dtype, count = memory.as_is(flat)
    unit = count // flat.numel() if flat.numel() else memory.as_is(flat.new_empty(1))[1]
    work = engine.run(
        requests.ALL_TO_ALL,
        dtype,
        [memory.place(flat, None, count)],
        results,
        keep=flat,
        agree=memory.agreement_on_dtype(call, flat),
        finish=functools.partial(_fill, engine, call, results, theirs, unit),
        row_count=1,
        rows=count,
        splits=[each * unit for each in mine],
    )
    if waits:
        work.wait()
    return work


def _fill(engine: Engine, call: str, results: Tensors, theirs: Sequence[int], unit: int, started: Started) -> None:
    received = [each // unit for each in started.rows(engine.size)]
    if received != list(theirs):
        raise RankMismatchError(
            f"{call}: the output sizes must equal the numbers of elements that the other ranks send. Received: "
            f"{received} elements from the ranks in order, but room for {list(theirs)}, on rank {engine.rank}. "
            "Exchange the sizes first."
        )
    if results and results[0].is_cuda:
        received_bytes = sum(each.numel() * each.element_size() for each in results)
        rows = torch.tensor(np.asarray(started.in_place(received_bytes)), dtype=torch.uint8, device="cpu")
        for each, piece in zip(results, rows.split([each.numel() * each.element_size() for each in results])):
            each.copy_(piece.view(each.dtype).view(each.shape))
        return
    started.copy_to((each.data_ptr(), each.numel() * each.element_size()) for each in results)


def _split(engine: Engine, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % engine.size:
            raise ConfigError(
                f"all_to_all_single: without split sizes, dimension 0 must be a multiple of the number of ranks "
                f"({engine.size}). Received: shape {list(tensor.shape)} on rank {engine.rank}."
            )
        splits = [rows // engine.size] * engine.size
    if len(splits) != engine.size or sum(splits) != rows or min(splits) < 0:
        raise ConfigError(
            f"all_to_all_single: one split size for each of {engine.size} ranks is needed, {rows} together. "
            f"Received: {list(splits)} on rank {engine.rank}."
        )
    row = tensor.numel() // rows if rows else 0
    return [each * row for each in splits]


def _split_into(outputs: Tensors, flat: torch.Tensor, _: object) -> None:
    for tensor, piece in zip(outputs, flat.split([each.numel() for each in outputs])):
        tensor.copy_(piece.view(tensor.shape))
