"""Passes the memory of PyTorch tensors to the engine without copies, and checks that this is possible."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from keras_ddl.communicator.native.dtypes import DTYPES
from keras_ddl.communicator.native.requests import OPS, Memory
from keras_ddl.errors import ConfigError
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from keras_ddl.torch.engine import Engine

# dtypes that can be reduced -> the engine's names.
_REDUCED = {getattr(torch, name): name for name in DTYPES}
_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
}
# Reductions of bools, as in other backends: whether any is true, or all are.
_OPS_OF_BOOLS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


def check(call: str, tensors: Sequence[torch.Tensor], *, ordered: bool = False) -> None:
    """Raises ConfigError for tensors that the engine cannot read in place.

    ordered: require elements in the order of their indices, for moves to tensors of another shape.
    """
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"{call}: backend 'ddl' takes CPU and CUDA tensors. Received: a tensor on {tensor.device}. Use "
                "tensor.cpu()."
            )
        if tensor.device != tensors[0].device:
            raise ConfigError(
                f"{call}: all tensors of a call must be on one device. Received: {tensors[0].device} and "
                f"{tensor.device}. Use tensor.to()."
            )
        if tensor.layout != torch.strided:
            raise ConfigError(
                f"{call}: tensors must be dense. Received: layout {tensor.layout}. Use tensor.to_dense(), or "
                "Embedding(sparse=False)."
            )
        if not (tensor.is_contiguous() if ordered else is_gapless(tensor)):
            raise ConfigError(
                f"{call}: tensors must be contiguous. Received: shape {list(tensor.shape)}, strides "
                f"{list(tensor.stride())}. Use tensor.contiguous()."
            )


def is_gapless(tensor: torch.Tensor) -> bool:
    """Whether the elements fill memory without gaps, in any order, which ranks then compare by the strides."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def reduction(call: str, op: ReduceOp, tensor: torch.Tensor) -> tuple[str, int]:
    """Returns the engine's dtype and op. Raises ConfigError: it lacks one of them."""
    name = next((name for each, name in _OPS.items() if op == each), None)
    if name is None:
        raise ConfigError(
            f"{call}: op must be SUM, AVG, MIN, MAX or PRODUCT. Received: {getattr(op, 'op', op)}. For bitwise ops, "
            "use a group with backend 'gloo'."
        )
    if tensor.dtype == torch.bool and name in _OPS_OF_BOOLS:
        return "uint8", OPS[_OPS_OF_BOOLS[name]]
    if tensor.dtype not in _REDUCED:
        raise ConfigError(
            f"{call}: the dtype must be one of {', '.join(map(str, _REDUCED))}, or torch.bool (not for AVG). Received: "
            f"{tensor.dtype}. Convert the tensor first."
        )
    return _REDUCED[tensor.dtype], OPS[name]


def as_is(tensor: torch.Tensor) -> tuple[str, int]:
    """Returns (dtype of the engine, number of its elements) to move a tensor of any dtype."""
    if tensor.dtype in _REDUCED:
        return _REDUCED[tensor.dtype], tensor.numel()
    return "uint8", tensor.numel() * tensor.element_size()


def place(tensor: torch.Tensor, out: torch.Tensor | None, count: int) -> Memory:
    device = tensor.device.index if tensor.is_cuda else None
    return Memory(tensor.data_ptr(), None if out is None else out.data_ptr(), count, device)


def agreement(call: str, tensors: Sequence[torch.Tensor]) -> str:
    """Returns the string that must be equal on all ranks: the call, and the tensors' dtypes and shapes."""
    return _agreement(call, *((each.dtype, each.shape, each.stride()) for each in tensors))


@functools.lru_cache(maxsize=4096)  # formatting takes longer than a small exchange
def _agreement(call: str, *tensors: tuple[torch.dtype, torch.Size, tuple[int, ...]]) -> str:
    return f"{call} of {', '.join(_text(*each) for each in tensors)}" if tensors else call


def agreement_on_dtype(call: str, tensor: torch.Tensor) -> str:
    """Like `agreement`, for shapes that may differ."""
    return f"{call} of tensors of dtype {_name(tensor.dtype)}"


def check_multiple(call: str, large: torch.Tensor, small: torch.Tensor, engine: Engine) -> None:
    """Raises ConfigError unless `large` has room for one `small` per rank."""
    if large.numel() != small.numel() * engine.size or large.dtype != small.dtype:
        raise ConfigError(
            f"{call}: one tensor must have {engine.size} times as many elements as the other, and the same dtype. "
            f"Received: {text(large)} and {text(small)} on rank {engine.rank}."
        )


def check_one_each(
    call: str, tensors: Sequence[torch.Tensor], engine: Engine, dtype: torch.dtype | None = None
) -> None:
    """Raises ConfigError unless there is one tensor per rank, all of the same dtype (`dtype`, if given)."""
    dtypes = {each.dtype for each in tensors} | ({dtype} if dtype is not None else set())
    if len(tensors) != engine.size or len(dtypes) > 1:
        raise ConfigError(
            f"{call}: one tensor for each of {engine.size} ranks is needed, all of one dtype. Received: "
            f"{len(tensors)}, {', '.join(sorted(map(_name, dtypes)))}, on rank {engine.rank}."
        )


def text(tensor: torch.Tensor) -> str:
    return _text(tensor.dtype, tensor.shape, tensor.stride())


def _text(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> str:
    description = f"tensor of dtype {_name(dtype)}, shape {list(shape)}"
    in_order = torch.empty_strided(shape, strides, device="meta").is_contiguous()
    return description if in_order else f"{description}, strides {list(strides)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
