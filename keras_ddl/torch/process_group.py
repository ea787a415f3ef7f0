"""A process group of torch.distributed whose collectives the engine runs.

Each group has a communicator of its own, so collectives of different groups do not wait for one another. All of one
group's have one name: they are matched in the order in which ranks call them, and a rank that calls another collective
than the others is told what each rank has called.
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
from keras_ddl.communicator import binding
from keras_ddl.communicator.native_library import Place
from keras_ddl.communicator.started import Started
from keras_ddl.errors import ConfigError, KerasDdlError, RankMismatchError
from keras_ddl.torch import memory
from keras_ddl.torch.point_to_point import PointToPoint
from keras_ddl.torch.work import Completions, DdlWork, Together, as_torch_error

Tensors = Sequence[torch.Tensor]


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Returns the group that torch.distributed asks for (DistributedBackendOptions). COLLECTIVE over its ranks."""
    communicator.init()
    world = communicator.communicator_of(None)
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if options.group_rank != ranks.index(world.rank) or max(ranks) >= world.size:
        raise ConfigError(
            "init_process_group: with backend 'ddl', ranks are those of the launcher of MPI. Received: rank "
            f"{options.group_rank} of ranks {ranks}, in the process that the launcher calls rank {world.rank} of "
            f"{world.size}. Leave out rank= and world_size=, and unset RANK and WORLD_SIZE."
        )
    comm = world.of_ranks(
        ranks, name=f"torch {options.group_id or 'default'}", deadline_seconds=options.timeout.total_seconds()
    )
    return ProcessGroup(comm, options.timeout)


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
    """The ranks of a communicator, to torch.distributed. Its methods have the names that PyTorch 2.8 to 2.15 call.

    Tensors are read and written where they lie, except in what needs them one after another and is given lists
    (allgather, reduce_scatter, gather, scatter, alltoall): they are copied once.
    """

    def __init__(self, comm: communicator.Communicator, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._completions = Completions()
        self._timeout = timeout
        self._peers = PointToPoint(comm, timeout)

    # ---- who

    def getBackendName(self) -> str:
        return "ddl"

    def name(self) -> str:
        return "ddl"

    def size(self) -> int:
        return self._comm.size

    def rank(self) -> int:
        return self._comm.rank

    def shutdown(self) -> None:
        self._completions.close()
        self._peers.close()
        self._comm.close()

    abort = shutdown

    # ---- collectives of one tensor each, where it lies

    @_in_torch_errors
    def allreduce(self, tensors: Tensors, opts: Any = None) -> DdlWork:
        return self.allreduce_coalesced(tensors, opts, "all_reduce")

    @_in_torch_errors
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None, call: str = "all_reduce_coalesced") -> DdlWork:
        memory.check(call, tensors)
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        kinds: dict[tuple[str, int], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault(memory.reduction(call, op, tensor), []).append(tensor)
        works = [
            self._run(
                binding.ALL_REDUCE,
                dtype,
                [memory.place(each, each, each.numel()) for each in some],
                some,
                call=call,
                agree=some,
                waits=_waits(opts) and len(kinds) == 1,
                op=number,
            )
            for (dtype, number), some in kinds.items()
        ]
        return self._all(works, tensors)

    @_in_torch_errors
    def broadcast(self, tensors: Tensors, opts: Any) -> DdlWork:
        memory.check("broadcast", tensors)
        (tensor,) = tensors
        dtype, count = memory.as_is(tensor)
        places = [memory.place(tensor, tensor, count)]
        return self._run(
            binding.BROADCAST,
            dtype,
            places,
            tensors,
            call="broadcast",
            agree=tensors,
            waits=_waits(opts),
            root=opts.rootRank,
        )

    @_in_torch_errors
    def reduce(self, tensors: Tensors, opts: Any) -> DdlWork:
        """As allreduce: also the tensors of other ranks than the root hold the result."""
        return self.allreduce_coalesced(tensors, opts, f"reduce to {opts.rootRank}")

    @_in_torch_errors
    def barrier(self, opts: Any = None) -> DdlWork:
        return self._run(binding.BARRIER, "uint8", [], [], call="barrier", waits=_waits(opts))

    @_in_torch_errors
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Returns when all ranks have come; else the error names those that have not."""
        work = self._run(binding.BARRIER, "uint8", [], [], call="barrier", waits=False)
        if timeout is None or timeout >= self._timeout:
            work.wait()
            return
        try:
            work.wait(timeout)
        except dist.DistBackendError as error:
            if work.is_completed():
                raise
            raise dist.DistBackendError(
                f"monitored_barrier: not all ranks came within {timeout.total_seconds():g} s (rank {self.rank()} did). "
                f"The group's own timeout, {self._timeout.total_seconds():g} s, names those that are missing."
            ) from error

    @_in_torch_errors
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> DdlWork:
        memory.check("all_gather_into_tensor", (output, tensor))
        self._check_multiple("all_gather_into_tensor", output, tensor)
        dtype, count = memory.as_is(tensor)
        return self._gather_rows(
            dtype, [memory.place(tensor, None, count)], output, (output, tensor), count, "all_gather_into_tensor", opts
        )

    _allgather_base = all_gather_single

    @_in_torch_errors
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> DdlWork:
        memory.check("reduce_scatter_tensor", (output, tensor))
        self._check_multiple("reduce_scatter_tensor", tensor, output)
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        dtype, number = memory.reduction("reduce_scatter_tensor", op, tensor)
        return self._run(
            binding.REDUCE_SCATTER,
            dtype,
            [memory.place(tensor, output, tensor.numel())],
            [output],
            keep=tensor,
            call="reduce_scatter_tensor",
            agree=[tensor],
            waits=_waits(opts),
            op=number,
            row_count=output.numel(),
            rows=self.size(),
        )

    _reduce_scatter_base = reduce_scatter_single

    @_in_torch_errors
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> DdlWork:
        memory.check("all_to_all_single", (output, tensor))
        return self._exchange(
            [output], tensor, self._splits(tensor, input_splits), self._splits(output, output_splits), opts
        )

    alltoall_base = all_to_all_single

    # ---- several at once

    @_in_torch_errors
    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> DdlWork:
        return self._all([self.all_gather_single(*pair, None) for pair in zip(outputs, tensors)], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_in_torch_errors
    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> DdlWork:
        opts = _later(opts, dist.ReduceScatterOptions)
        return self._all([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, tensors)], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_in_torch_errors
    def allgather_coalesced(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> DdlWork:
        # outputs[rank][i] is that rank's tensors[i].
        columns = [[row[i] for row in outputs] for i in range(len(tensors))]
        works = [self.allgather([column], [tensor], None) for column, tensor in zip(columns, tensors)]
        return self._all(works, list(itertools.chain(*outputs)))

    # ---- lists of tensors

    @_in_torch_errors
    def allgather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> DdlWork:
        (results,), (tensor,) = outputs, tensors
        memory.check("all_gather", (*results, tensor))
        self._check_one_each("all_gather", results)
        flat = torch.empty(sum(each.numel() for each in results), dtype=tensor.dtype)
        dtype, count = memory.as_is(tensor)
        # One row of each rank, or as many as elements where ranks have different numbers of them.
        equal = all(each.numel() == tensor.numel() for each in results)
        return self._gather_rows(
            dtype,
            [memory.place(tensor, None, count)],
            flat,
            (tensor, flat),
            count if equal else 1,
            "all_gather",
            opts,
            results,
            agree=tensors if equal else (),
        )

    @_in_torch_errors
    def reduce_scatter(self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = None) -> DdlWork:
        (output,), (pieces,) = outputs, tensors
        memory.check("reduce_scatter", (output, *pieces))
        self._check_one_each("reduce_scatter", pieces)
        if all(each.numel() == output.numel() for each in pieces):
            return self.reduce_scatter_single(output, torch.cat([each.reshape(-1) for each in pieces]), opts)
        # Ranks get different numbers of elements: each piece by itself, of which one is kept.
        sums = [output if rank == self.rank() else torch.empty_like(each) for rank, each in enumerate(pieces)]
        for total, piece in zip(sums, pieces):
            total.copy_(piece)
        later = _later(opts, dist.AllreduceOptions)
        return self._all([self.allreduce([each], later) for each in sums], outputs)

    @_in_torch_errors
    def gather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> DdlWork:
        (tensor,) = tensors
        results = outputs[0] if self.rank() == opts.rootRank else []
        memory.check("gather", (*results, tensor))
        mine = [tensor.numel() if rank == opts.rootRank else 0 for rank in range(self.size())]
        theirs = [each.numel() for each in results] or [0] * self.size()
        return self._exchange(results, tensor.reshape(-1), mine, theirs, opts)

    @_in_torch_errors
    def scatter(self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any) -> DdlWork:
        (output,) = outputs
        root = self.rank() == opts.rootRank
        pieces = tensors[0] if root else []
        memory.check("scatter", (*pieces, output))
        flat = torch.cat([each.reshape(-1) for each in pieces]) if root else output.new_empty(0)
        mine = [each.numel() for each in pieces] or [0] * self.size()
        theirs = [output.numel() if rank == opts.rootRank else 0 for rank in range(self.size())]
        return self._exchange([output], flat, mine, theirs, opts)

    @_in_torch_errors
    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> DdlWork:
        memory.check("all_to_all", (*outputs, *tensors))
        self._check_one_each("all_to_all", outputs)
        self._check_one_each("all_to_all", tensors)
        flat = torch.cat([each.reshape(-1) for each in tensors])
        mine, theirs = [each.numel() for each in tensors], [each.numel() for each in outputs]
        return self._exchange(outputs, flat, mine, theirs, opts)

    # ---- between two ranks

    @_in_torch_errors
    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        memory.check("send", tensors)
        return self._peers.send(tensors[0], to, tag)

    @_in_torch_errors
    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        memory.check("recv", tensors)
        return self._peers.receive(tensors[0], source, tag)

    @_in_torch_errors
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        memory.check("recv", tensors)
        return self._peers.receive(tensors[0], None, tag)

    # ---- inside

    def _run(
        self,
        kind: int,
        dtype: str,
        places: Sequence[binding.Memory],
        results: Tensors,
        *,
        call: str,
        keep: Any = None,
        agree: Tensors = (),
        waits: bool = False,
        finish: Callable[[Any], None] | None = None,
        **fields: Any,
    ) -> DdlWork:
        """Runs a collective, on this thread where the caller waits anyway.

        agree: tensors whose dtypes and shapes are equal on all ranks. finish: brings the result to its place.
        """
        native = self._comm.native()
        detail = f"{call} of {', '.join(map(memory.text, agree))}" if agree else call
        request = native.request(kind, f"{self._comm.prefix}collective", dtype, places, detail=detail, **fields)
        keep = (keep, results, agree)
        if waits:
            native.run(request, keep)
            if finish is not None:
                finish(None)
            return DdlWork(results)
        return DdlWork(results, native.start(request, keep), finish, self._completions)

    def _all(self, works: Sequence[DdlWork], results: Tensors) -> DdlWork:
        """Returns one work for several."""
        if len(works) == 1:
            return works[0]
        return DdlWork(results, Together(works), completions=self._completions)

    def _gather_rows(
        self,
        dtype: str,
        places: Sequence[binding.Memory],
        output: torch.Tensor,
        keep: Any,
        row_count: int,
        call: str,
        opts: Any,
        results: Tensors | None = None,
        agree: Tensors | None = None,
    ) -> DdlWork:
        row_count = max(row_count, 1)
        rows = places[0].count // row_count
        place = Place(out=output.data_ptr(), row_count=row_count, rows=memory.as_is(output)[1] // row_count)
        finish = None if results is None else functools.partial(_split_into, results, output)
        return self._run(
            binding.ALL_GATHER,
            dtype,
            places,
            [output] if results is None else results,
            keep=(keep, output),
            call=call,
            agree=keep[-1:] if agree is None else agree,
            waits=_waits(opts),
            finish=finish,
            row_count=row_count,
            rows=rows,
            place=place,
        )

    def _exchange(
        self, results: Tensors, flat: torch.Tensor, mine: Sequence[int], theirs: Sequence[int], opts: Any
    ) -> DdlWork:
        """Sends `mine[r]` elements of `flat` to rank r, and fills `results` with what comes, `theirs[r]` of rank r."""
        dtype, count = memory.as_is(flat)
        unit = count // flat.numel() if flat.numel() else 1
        native = self._comm.native()
        request = native.request(
            binding.ALL_TO_ALL,
            f"{self._comm.prefix}collective",
            dtype,
            [memory.place(flat, None, count)],
            detail="all_to_all",
            row_count=1,
            rows=count,
            splits=[each * unit for each in mine],
        )
        fill = functools.partial(self._fill, results, theirs, unit)
        work = DdlWork(results, native.start(request, (flat, results)), fill, self._completions)
        if _waits(opts):
            work.wait()
        return work

    def _fill(self, results: Tensors, theirs: Sequence[int], unit: int, started: Started) -> None:
        came = [each // unit for each in started.rows(self.size())]
        if came != list(theirs):
            raise RankMismatchError(
                f"all_to_all: what a rank expects of each rank must be what these send it. Received on rank "
                f"{self.rank()}: {came} elements by rank, where {list(theirs)} are expected. Exchange the numbers "
                "first."
            )
        started.copy_to((each.data_ptr(), each.numel() * each.element_size()) for each in results)

    def _splits(self, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self.size():
                raise ConfigError(
                    f"all_to_all_single: without split sizes, dimension 0 must be a multiple of the number of ranks "
                    f"({self.size()}). Received: shape {list(tensor.shape)} on rank {self.rank()}."
                )
            splits = [rows // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != rows or min(splits) < 0:
            raise ConfigError(
                f"all_to_all_single: one split size for each of {self.size()} ranks is needed, {rows} together. "
                f"Received: {list(splits)} on rank {self.rank()}."
            )
        row = tensor.numel() // rows if rows else 0
        return [each * row for each in splits]

    def _check_multiple(self, call: str, large: torch.Tensor, small: torch.Tensor) -> None:
        if large.numel() != small.numel() * self.size() or large.dtype != small.dtype:
            raise ConfigError(
                f"{call}: one tensor must be {self.size()} times the other, of one dtype. Received: "
                f"{memory.text(large)} and {memory.text(small)} on rank {self.rank()}."
            )

    def _check_one_each(self, call: str, tensors: Tensors) -> None:
        if len(tensors) != self.size() or len({each.dtype for each in tensors}) > 1:
            raise ConfigError(
                f"{call}: one tensor for each of {self.size()} ranks is needed, all of one dtype. Received: "
                f"{len(tensors)}, {sorted({str(each.dtype) for each in tensors})}, on rank {self.rank()}."
            )


def _waits(opts: Any) -> bool:
    """Whether the caller waits for the collective as soon as it has begun: PyTorch 2.8 and later tell."""
    return opts is not None and not getattr(opts, "asyncOp", True)


def _later(opts: Any, kind: type) -> Any:
    """Returns the options, for several collectives that begin before the first is waited for."""
    made = kind()
    made.asyncOp = True
    if opts is not None:
        made.reduceOp = opts.reduceOp
    return made


def _split_into(results: Tensors, flat: torch.Tensor, _: Any) -> None:
    for tensor, piece in zip(results, flat.split([each.numel() for each in results])):
        tensor.copy_(piece.view(tensor.shape))
