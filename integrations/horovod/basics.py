"""Horovod's names for init, shutdown, ranks, sizes and build features, on top of keras_ddl.communicator."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator import is_initialized, local_rank, local_size, rank, recording, size  # noqa: F401
from keras_ddl.communicator.native import native_library
from keras_ddl.communicator.transports import mpi
from keras_ddl.errors import ConfigError
from keras_ddl.horovod import installation
from keras_ddl.horovod import process_sets as sets
from keras_ddl.horovod.failures import UnsupportedError


class ReduceOp(enum.StrEnum):
    """Reductions; the values are keras_ddl.all_reduce's names."""

    Average = "mean"
    Sum = "sum"
    Adasum = "adasum"
    Min = "min"
    Max = "max"
    Product = "product"


def reduce_op(op: Any) -> ReduceOp:
    """Returns the ReduceOp for a caller's `op`; None means Average. Raises: ConfigError: unknown op."""
    try:
        return ReduceOp.Average if op is None else ReduceOp(op)
    except ValueError:
        raise ConfigError(f"op must be one of {', '.join(each.name for each in ReduceOp)}. Received: {op!r}.") from None


def check_sparse(op: ReduceOp) -> None:
    """Raises: UnsupportedError: tf.IndexedSlices cannot be reduced by `op`."""
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise UnsupportedError(
            f"IndexedSlices can be reduced only by Average and Sum. Received: op={op.name}. Use sparse_as_dense=True."
        )


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def init(comm: Any = None, process_sets: Sequence[sets.ProcessSet] | str | None = None) -> None:
    """Joins this process with the other ranks: `keras_ddl.init`. COLLECTIVE.

    Limits TensorFlow, including sessions of tf.compat.v1, to this rank's share of the host's cores, unless the script
    has set a limit or TensorFlow has started.

    Args:
        comm: must be all ranks: None, a list of ranks, or an MPI communicator.
        process_sets: ProcessSets to register, equal and in the same order on all ranks. "dynamic": none yet;
            `add_process_set` always works.

    Raises:
        ConfigError: `comm` is something else. Otherwise as `keras_ddl.init` and `add_process_set`.
    """
    is_first = not communicator.is_initialized()
    topology = communicator.init()
    if is_first:
        from keras_ddl.device import share_cores

        share_cores(topology)
    # The first DistributedOptimizer would be too late: in `model.compile(hvd.DistributedOptimizer(...))`, Python has
    # already looked up Keras's compile.
    from keras_ddl.strategy import keras_patches

    keras_patches.install()
    if installation.is_installed():  # the script may not be adapted to Keras 3
        from keras_ddl.horovod import old_keras_names

        old_keras_names.install()
    all_ranks = list(range(size()))
    named = list(range(comm.Get_size())) if hasattr(comm, "Get_size") else comm
    if named is not None and not (isinstance(named, Sequence) and sorted(named) in ([], all_ranks)):
        raise ConfigError(
            f"init: comm must be all ranks of the job ({size()}). Received: comm={comm!r}. Start fewer ranks, or use "
            "process_sets."
        )
    if process_sets is None or process_sets == "dynamic":
        return
    if isinstance(process_sets, str):
        raise ConfigError(f"init: process_sets must be a list or 'dynamic'. Received: {process_sets!r}.")
    for process_set in process_sets:
        sets.add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job and drops all process sets: `keras_ddl.shutdown`. Not collective."""
    sets.forget_all()
    communicator.shutdown()


def cross_rank() -> int:
    """Returns this host's index among the hosts that have a rank with this local_rank."""
    place = communicator.topology()
    return _hosts_beside().index(place.hosts[place.rank])


def cross_size() -> int:
    """Returns the number of hosts that have a rank with this local_rank."""
    return len(_hosts_beside())


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    hosts = communicator.topology().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def mpi_threads_supported() -> bool:
    """Whether MPI is running and several threads may call it. Raises: NotInitializedError: before `init`."""
    communicator.topology()
    if not mpi.running():
        return False
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def mpi_built(verbose: bool = False) -> bool:
    """Whether keras_ddl's library for MPI is installed."""
    return bool(native_library.mpi_families())


def mpi_enabled() -> bool:
    """Whether the ranks of this job are joined by MPI; False for a rank that runs alone."""
    return mpi.running()


def gloo_built(verbose: bool = False) -> bool:
    """Returns False: keras_ddl does not use Gloo."""
    return False


def gloo_enabled() -> bool:
    """Returns False, as `gloo_built`."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """Returns 0, because TensorFlow's tensors on GPUs are sent through host memory, not by NCCL."""
    return 0


def cuda_built(verbose: bool = False) -> bool:
    """Returns False: collectives on TensorFlow's tensors do not use CUDA, even if TensorFlow does."""
    return False


def rocm_built(verbose: bool = False) -> bool:
    """Returns False, as `cuda_built`."""
    return False


def ddl_built(verbose: bool = False) -> bool:
    """Returns False: keras_ddl does not use IBM's library."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Returns False: keras_ddl does not use oneCCL."""
    return False


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begins a timeline, one file per calling rank: `keras_ddl.timeline.start`.

    Raises: ConfigError: `mark_cycles` is True, or as `keras_ddl.timeline.start`.
    """
    if mark_cycles:
        raise ConfigError("start_timeline: keras_ddl has no cycles to mark. Received: mark_cycles=True. Leave it out.")
    recording.start(file_path, communicator.rank())


def stop_timeline() -> None:
    """Ends this rank's timeline; `keras_ddl.timeline.merge` merges the ranks' files."""
    recording.stop()


def _hosts_beside() -> list[int]:
    place = communicator.topology()
    return [host for host in dict.fromkeys(place.hosts) if place.hosts.count(host) > place.local_rank]
