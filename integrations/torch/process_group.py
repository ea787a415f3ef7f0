"""A process group of torch.distributed: PyTorch's method names for the engine's collectives.

Each group has its own communicator, so collectives of different groups do not wait for each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from keras_ddl import communicator
from keras_ddl.communicator.native import requests
from keras_ddl.errors import ConfigError, KerasDdlError
from keras_ddl.torch import memory, moves, reductions
from keras_ddl.torch.engine import Engine
from keras_ddl.torch.point_to_point import PointToPoint
from keras_ddl.torch.work import DdlWork, as_torch_error
from torch.distributed import DistError, Store

Tensors = Sequence[torch.Tensor]


class RollCall:
    """Records in the store which ranks have reached a barrier. Barriers are numbered, so that each has its own keys."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._number = 0

    def announce(self) -> None:
        """Announces that this rank has reached the next barrier."""
        self._number += 1
        self._store.set(self._key(self._number, self._rank), "here")
        if self._number > 2:  # all ranks have left that barrier
            self._store.delete_key(self._key(self._number - 2, self._rank))

    def missing(self) -> list[int] | None:
        """Returns the ranks that have not reached the barrier; None if the rank that hosts the store has ended."""
        try:
            return [rank for rank in range(self._size) if not self._store.check([self._key(self._number, rank)])]
        except DistError:
            return None

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"ddl monitored_barrier {number} rank {rank}"


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Creates a group for torch.distributed. `options`: DistributedBackendOptions. COLLECTIVE over its ranks."""
    communicator.init()
    world = communicator.communicator_of(None)
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    fits = world.rank in ranks and max(ranks) < world.size
    if not fits or options.group_rank != ranks.index(world.rank):
        raise ConfigError(
            "init_process_group: with backend 'ddl', ranks must be the launcher's. Received: rank "
            f"{options.group_rank} of ranks {ranks}, in the process that is the launcher's rank {world.rank} of "
            f"{world.size}. Start the program with `keras-ddl run`; leave out rank= and world_size=, and unset RANK "
            "and WORLD_SIZE."
        )
    comm = world.of_ranks(
        ranks, name=f"torch {options.group_id or 'default'}", deadline_seconds=options.timeout.total_seconds()
    )
    return ProcessGroup(comm, options.timeout, options.store)


def _in_torch_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except ConfigError:  # a ValueError, as for other backends
            raise
        except KerasDdlError as error:
            raise as_torch_error(error) from error

    return call


class ProcessGroup(dist.ProcessGroup):
    """A communicator as a group of torch.distributed. Its methods have the names that PyTorch 2.8 to 2.15 call.

    Tensors are read and written in place, except in collectives on lists that need contiguous memory (allgather,
    reduce_scatter, gather, scatter, alltoall), which copy once.
    """

    def __init__(self, comm: communicator.Communicator, timeout: timedelta, store: dist.Store) -> None:
        super().__init__(comm.rank, comm.size)
        self._engine = Engine(comm)
        self._timeout = timeout
        self._peers = PointToPoint(comm, timeout)
        self._roll_call = RollCall(store, comm.rank, comm.size)
        self._name, self._description = "", ""

    # ---- properties

    def getBackendName(self) -> str:
        return "ddl"

    def name(self) -> str:
        return "ddl"

    # PyTorch stores names in backends, but this group is its own backend.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        # PyTorch 2.14 queries the backend's `supports_coalescing`.
        return self

    @property
    def supports_coalescing(self) -> bool:
        return False

    def size(self) -> int:
        return self._engine.size

    def rank(self) -> int:
        return self._engine.rank

    def shutdown(self) -> None:
        self._peers.close()
        self._engine.close()

    abort = shutdown

    # ---- reductions

    @_in_torch_errors
    def allreduce(self, tensors: Tensors, opts: Any = None) -> DdlWork:
        return reductions.all_reduce(self._engine, "all_reduce", tensors, _op(opts), _waits(opts))

    @_in_torch_errors
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> DdlWork:
        return reductions.all_reduce(self._engine, "all_reduce_coalesced", tensors, _op(opts), _waits(opts))

    @_in_torch_errors
    def reduce(self, tensors: Tensors, opts: Any) -> DdlWork:
        """Like allreduce: all ranks' tensors get the result, not only the root's."""
        call = f"reduce to rank {opts.rootRank}"
        return reductions.all_reduce(self._engine, call, tensors, _op(opts), _waits(opts))

    @_in_torch_errors
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> DdlWork:
        return reductions.reduce_scatter_single(self._engine, output, tensor, _op(opts), _waits(opts))

    _reduce_scatter_base = reduce_scatter_single

    @_in_torch_errors
    def reduce_scatter(self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = None) -> DdlWork:
        (output,), (pieces,) = outputs, tensors
        return reductions.reduce_scatter(self._engine, output, pieces, _op(opts), _waits(opts))

    @_in_torch_errors
    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> DdlWork:
        pairs = zip(outputs, tensors)
        works = [reductions.reduce_scatter_single(self._engine, *pair, _op(opts), False) for pair in pairs]
        return self._engine.together(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- moves

    @_in_torch_errors
    def broadcast(self, tensors: Tensors, opts: Any) -> DdlWork:
        (tensor,) = tensors
        return moves.broadcast(self._engine, tensor, opts.rootRank, _waits(opts))

    @_in_torch_errors
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> DdlWork:
        return moves.all_gather_single(self._engine, output, tensor, _waits(opts))

    _allgather_base = all_gather_single

    @_in_torch_errors
    def allgather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> DdlWork:
        (results,), (tensor,) = outputs, tensors
        return moves.all_gather(self._engine, results, tensor, _waits(opts))

    @_in_torch_errors
    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> DdlWork:
        works = [moves.all_gather_single(self._engine, *pair, False) for pair in zip(outputs, tensors)]
        return self._engine.together(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_in_torch_errors
    def allgather_coalesced(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> DdlWork:
        # outputs[rank][i] is that rank's tensors[i].
        columns = [[row[i] for row in outputs] for i in range(len(tensors))]
        works = [moves.all_gather(self._engine, column, each, False) for column, each in zip(columns, tensors)]
        return self._engine.together(works, list(itertools.chain(*outputs)))

    @_in_torch_errors
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> DdlWork:
        return moves.all_to_all_single(self._engine, output, tensor, output_splits, input_splits, _waits(opts))

    alltoall_base = all_to_all_single

    @_in_torch_errors
    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> DdlWork:
        return moves.all_to_all(self._engine, outputs, tensors, _waits(opts))

    @_in_torch_errors
    def gather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> DdlWork:
        (tensor,) = tensors
        results = outputs[0] if self.rank() == opts.rootRank else []
        return moves.gather(self._engine, results, tensor, opts.rootRank, _waits(opts))

    @_in_torch_errors
    def scatter(self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any) -> DdlWork:
        (output,) = outputs
        pieces = tensors[0] if self.rank() == opts.rootRank else []
        return moves.scatter(self._engine, output, pieces, opts.rootRank, _waits(opts))

    # ---- barriers

    @_in_torch_errors
    def barrier(self, opts: Any = None) -> DdlWork:
        return self._engine.run(requests.BARRIER, "uint8", [], [], agree="barrier", waits=_waits(opts))

    @_in_torch_errors
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Returns when all ranks have called it; otherwise raises an error that names the missing ranks."""
        self._roll_call.announce()
        work = self._engine.run(requests.BARRIER, "uint8", [], [], agree="monitored_barrier")
        if timeout is None or timeout >= self._timeout or work.ends_within(timeout.total_seconds()):
            work.wait()
            return
        missing = self._roll_call.missing()
        if missing == []:  # the last rank has just arrived
            work.wait()
            return
        raise dist.DistBackendError(
            f"monitored_barrier: all ranks must arrive within {timeout.total_seconds():g} s. Missing: rank(s) "
            f"{', '.join(map(str, missing or ())) or 'unknown'} of {self.size()}, seen on rank {self.rank()}. The "
            f"barrier stays active: ranks that arrive later pass it."
        )

    # ---- between two ranks

    @_in_torch_errors
    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        memory.check("send", tensors, ordered=True)
        return self._peers.send(tensors[0], to, tag)

    @_in_torch_errors
    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        memory.check("recv", tensors, ordered=True)
        return self._peers.receive(tensors[0], source, tag)

    @_in_torch_errors
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        memory.check("recv", tensors, ordered=True)
        return self._peers.receive(tensors[0], None, tag)


def _waits(opts: Any) -> bool:
    """Whether the caller waits for the collective at once, as PyTorch 2.8 and later report."""
    return opts is not None and not getattr(opts, "asyncOp", True)


def _op(opts: Any) -> dist.ReduceOp:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp
