"""Compares DistributedDataParallel and FSDP over backend "ddl" with the same training in one process."""

import copy
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keras_ddl.torch  # noqa: F401  (registers the backend)
from harness.rank_program import skip
from keras_ddl import timeline

if not dist.is_initialized():
    dist.init_process_group("ddl")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
ROWS = 6


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)).double()


def batches(count=4):
    generator = torch.Generator(device="cpu").manual_seed(5)
    for _ in range(count):
        x, y = (torch.randn(SIZE * ROWS, n, generator=generator, dtype=torch.float64, device="cpu") for n in (7, 2))
        yield x.to(torch.get_default_device()), y.to(torch.get_default_device())


def train(model, wrapped, *, mine):
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    for x, y in batches():
        if mine:
            x, y = x[RANK * ROWS : (RANK + 1) * ROWS], y[RANK * ROWS : (RANK + 1) * ROWS]
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    return model


def assert_close(found, expected):
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def check_ddp_equals_one_process():
    expected = train(model := network(), model, mine=False)
    for options in ({}, {"bucket_cap_mb": 0.001}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        model = network()
        assert_close(train(model, DistributedDataParallel(model, **options), mine=True), expected)


def check_ddp_starts_from_rank_0():
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(RANK)
    DistributedDataParallel(model)
    assert_close(model, network())


def check_ddp_reduces_buckets_while_the_backward_pass_runs():
    reduced = threading.Event()

    class Waits(torch.autograd.Function):
        """Computes no gradient before the gradient of a later layer has been reduced."""

        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            assert step == 0 or reduced.wait(60), "the bucket of the last layer was not reduced meanwhile"
            return gradient

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(7, 100), nn.Linear(100, 4000)  # larger than the first bucket

        def forward(self, x):
            return self.last(Waits.apply(self.first(x)))

    def hook(_, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: reduced.set() or done.value()[0])

    wrapped = DistributedDataParallel(Network(), bucket_cap_mb=1)
    wrapped.register_comm_hook(None, hook)
    for step in range(2):  # PyTorch plans the buckets in the first step
        reduced.clear()
        wrapped((step + 1) * torch.ones(4, 7)).sum().backward()


def check_timeline_shows_reductions_during_the_backward_pass():
    with tempfile.TemporaryDirectory() as folder:
        path = timeline.start(Path(folder) / "steps.json")
        layers = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
        wrapped = DistributedDataParallel(layers, bucket_cap_mb=0.3)
        layers[0].weight.register_hook(
            lambda _: timeline.add_span("gradients", begun)
        )  # this gradient is computed last
        for _ in range(3):
            loss = wrapped(torch.ones(8, 200)).sum()
            begun = time.monotonic()
            loss.backward()
        timeline.stop()
        events = timeline.read(path)
    span = [each for each in events if each.get("name") == "gradients"][-1]
    begin, end = span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6
    reduced = [each for each in timeline.collectives_of(events) if each.kind == "all_reduce"]
    buckets = [each for each in reduced if begin < each.submitted]
    assert len(buckets) >= 3
    assert sum(each.submitted < end for each in buckets) >= 2


def check_ddp_powersgd_hook():
    """The hook's callbacks wait for collectives that they start."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    models = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        wrapped = DistributedDataParallel(network(), process_group=group)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        models.append(train(wrapped.module, wrapped, mine=True))
    assert_close(*models)


def check_error_in_the_backward_pass_of_ddp():
    """If a rank calls another collective in the middle of a step, all ranks get an exception and can continue."""
    if SIZE == 1:
        skip("needs another rank")
    model = network()
    wrapped = DistributedDataParallel(model)
    x, y = next(batches())
    loss = nn.functional.mse_loss(wrapped(x.chunk(SIZE)[RANK]), y.chunk(SIZE)[RANK])
    with pytest.raises(RuntimeError, match="RankMismatchError"):
        if RANK == SIZE - 1:
            dist.broadcast(torch.ones(3), 0)
        else:
            loss.backward()
    dist.barrier()


def check_zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, alone = network(), network()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
    expected = torch.optim.Adam(alone.parameters(), lr=0.01)
    for x, y in batches():
        for each, rows, labels, some in (
            (wrapped, x.chunk(SIZE)[RANK], y.chunk(SIZE)[RANK], optimizer),
            (alone, x, y, expected),
        ):
            some.zero_grad()
            nn.functional.mse_loss(each(rows), labels).backward()
            some.step()
    assert_close(model, alone)


def check_fsdp2_equals_one_process():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    expected = train(model := network(), model, mine=False)
    model = copy.deepcopy(network())
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    train(model, model, mine=True)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-13)
