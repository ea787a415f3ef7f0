"""The engine as a backend of torch.distributed, "ddl": for DistributedDataParallel, FSDP, and Keras on PyTorch.

    import torch.distributed as dist
    import keras_ddl.torch

    dist.init_process_group("ddl")

The import registers the backend. Under `keras-ddl run`, mpirun or srun, `init_process_group` needs neither MASTER_ADDR
nor RANK; the import sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from keras_ddl import packages
from keras_ddl.errors import DependencyError

try:
    import torch.distributed as dist
except ImportError as error:
    raise DependencyError(
        f"keras_ddl.torch needs PyTorch. Received: {error}. Install it (for CPUs alone, PyTorch's CPU build "
        f"first: docs/install.md): {packages.pip_install('[torch]')}"
    ) from error

from keras_ddl.torch import process_group, rendezvous

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["monitored_barrier"]


def __dir__() -> list[str]:
    return sorted(__all__)


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Returns when every rank of `group` has called it; names the ranks that have not within `timeout`. COLLECTIVE.

    torch.distributed.monitored_barrier accepts only groups of gloo; this one accepts groups of "ddl".

    Args:
        group: None: all ranks.
        timeout: None: the group's timeout.
        wait_all_ranks: ignored; the error always names all missing ranks.

    Raises:
        torch.distributed.DistBackendError: ranks are missing; on every rank that called it.
    """
    (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)


if dist.is_available() and "ddl" not in dist.Backend.backend_list:
    dist.Backend.register_backend("ddl", process_group.create, extended_api=True, devices=["cpu", "cuda"])
    rendezvous.install()
