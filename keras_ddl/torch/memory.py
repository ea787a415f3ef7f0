"""Tensors of PyTorch as memory that the engine reads and writes where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from keras_ddl.communicator.binding import OPS, Memory
from keras_ddl.errors import ConfigError

# What is reduced, and as what the engine reads it.
_REDUCED = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.int8: "int8",
}
_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
}
# Of bools, as of other backends: whether any is true, or all are.
_OPS_OF_BOOLS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


def check(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ConfigError for what cannot be read where it lies."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"{call}: backend 'ddl' takes tensors in the memory of the CPU. Received: one on {tensor.device}. Use "
                "tensor.cpu(), or backend 'nccl' for what lies on GPUs: init_process_group('cpu:ddl,cuda:nccl')."
            )
        if tensor.layout != torch.strided:
            raise ConfigError(
                f"{call}: tensors must be dense. Received: layout {tensor.layout}. Use tensor.to_dense(), or "
                "Embedding(sparse=False)."
            )
        if not is_whole(tensor):
            raise ConfigError(
                f"{call}: tensors must be contiguous. Received: shape {list(tensor.shape)}, strides "
                f"{list(tensor.stride())}. Use tensor.contiguous()."
            )


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether the elements lie one after another, in whatever order: ranks then agree on it by their strides."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def reduction(call: str, op: ReduceOp, tensor: torch.Tensor) -> tuple[str, int]:
    """Returns the engine's dtype and op. Raises ConfigError for those that it does not have."""
    name = next((name for each, name in _OPS.items() if op == each), None)
    if name is None:
        raise ConfigError(
            f"{call}: op must be SUM, AVG, MIN, MAX or PRODUCT. Received: "
            f"{getattr(op, 'op', op)}. Backend 'gloo' has bitwise ones."
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
    """Returns a dtype of the engine and how many elements of it the tensor is: what is only moved may be of any."""
    if tensor.dtype in _REDUCED:
        return _REDUCED[tensor.dtype], tensor.numel()
    return "uint8", tensor.numel() * tensor.element_size()


def place(tensor: torch.Tensor, out: torch.Tensor | None, count: int) -> Memory:
    """Returns the memory of a tensor, and of where the result goes."""
    return Memory(tensor.data_ptr(), None if out is None else out.data_ptr(), count)


def text(tensor: torch.Tensor) -> str:
    """Says what ranks must agree on."""
    shape = f"tensor of dtype {str(tensor.dtype).removeprefix('torch.')}, shape {list(tensor.shape)}"
    return shape if tensor.is_contiguous() else f"{shape}, strides {list(tensor.stride())}"
