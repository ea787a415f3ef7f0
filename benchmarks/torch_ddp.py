"""Compares torch.distributed's backends "ddl" and "gloo": all_reduce by size, and a step of DistributedDataParallel.

    keras-ddl run -np 2 python benchmarks/torch_ddp.py
    keras-ddl run -np 4 python benchmarks/torch_ddp.py --networks ""

Both are groups of the same processes and take turns in one run; times are medians of the slowest rank. "of memcpy"
compares ddl with one core copying as many bytes while the other ranks do the same, which is the bound for reading every
input and writing every output once. For a step, "independent" means that every rank trains alone at the same time;
"adds" is the time that a backend adds, and "nothing adds" the time that DistributedDataParallel adds without an
exchange, for its copies into buckets and back.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from _smoke import options_of
from _torch_networks import NETWORKS, Network
from torch.nn.parallel import DistributedDataParallel

import keras_ddl.torch  # noqa: F401  (registers the backend)

SIZES = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]


def slowest(seconds: float, group: dist.ProcessGroup) -> float:
    """Returns the seconds of the rank that took longest. COLLECTIVE."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.item()


def timed(call: Callable[[], None], times: int, group: dist.ProcessGroup) -> float:
    """Returns seconds of one of `times` calls. COLLECTIVE."""
    dist.barrier(group)
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return slowest((time.perf_counter() - begun) / times, group)


def all_reduces(groups: dict[str, dist.ProcessGroup], sizes: list[int], rounds: int) -> None:
    first = dist.get_rank() == 0
    if first:
        print(f"{'bytes':>10} {'ddl, us':>10} {'gloo, us':>10} {'gloo / ddl':>10} {'of memcpy':>10}", flush=True)
    ratios = {}
    for size in sizes:
        tensor, other = torch.ones(size // 4), torch.ones(size // 4)
        times = max(3, min(200, int(2e8 / (size + 1e6))))
        calls = {name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
        calls["memcpy"] = partial(other.copy_, tensor)
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, call in calls.items():
                tensor.fill_(1.0)
                seconds = timed(call, times, groups["ddl"])
                if turn:
                    found[name].append(seconds)
        ddl, gloo, memcpy = (1e6 * statistics.median(found[name]) for name in ("ddl", "gloo", "memcpy"))
        ratios[size] = gloo / ddl
        if first:
            print(f"{size:>10} {ddl:>10.1f} {gloo:>10.1f} {gloo / ddl:>10.2f} {memcpy / ddl:>10.2f}", flush=True)
    large = [math.log(ratio) for size, ratio in ratios.items() if size >= 64 << 10]
    if first and large:
        print(f"geometric mean of gloo / ddl from 64 KB on: {math.exp(statistics.mean(large)):.2f}\n", flush=True)


def _exchange_nothing(_, bucket):  # PyTorch compares annotations with types, which here are strings
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def steps(groups: dict[str, dist.ProcessGroup], network: Network, count: int, rounds: int) -> dict[str, float]:
    """Returns the median seconds of a step by contestant, and the time that each exchange adds. COLLECTIVE."""
    torch.manual_seed(0)
    models = {"independent": network.make(), "nothing": DistributedDataParallel(network.make())}
    models["nothing"].register_comm_hook(None, _exchange_nothing)
    for name, group in groups.items():
        models[name] = DistributedDataParallel(network.make(), process_group=group)
    x, y = torch.randn(network.rows), torch.randint(network.classes, network.rows[:1])
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.01) for name, model in models.items()}

    def step(name: str) -> None:
        optimizers[name].zero_grad()
        torch.nn.functional.cross_entropy(models[name](x), y).backward()
        optimizers[name].step()

    found: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, seconds in found.items():
            one = timed(lambda: step(name), count, groups["ddl"])  # noqa: B023
            if turn:
                seconds.append(one)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    for name in ("nothing", *groups):  # compares turns of one round, because the machine's speed drifts
        medians[f"{name} adds"] = statistics.median(
            one - other for one, other in zip(found[name], found["independent"])
        )
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes; '' for none")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="default: all; '' for none")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default: 5)")
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn (default: 8)")
    options = options_of(parser, sizes="1024", networks="", rounds=1)
    torch.set_num_threads(1)
    dist.init_process_group("ddl")
    groups = {"ddl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, PyTorch {torch.__version__}, one thread each\n", flush=True)
    if options.sizes:
        all_reduces(groups, [int(each) for each in options.sizes.split(",")], options.rounds)
    if dist.get_rank() == 0 and options.networks:
        columns = ("independent", "ddl", "gloo", "nothing adds", "ddl adds", "gloo adds")
        print("Milliseconds of a step.")
        print(f"{'network':>8} {' '.join(f'{each:>12}' for each in columns)} {'ratio':>6}", flush=True)
    for name in filter(None, options.networks.split(",")):
        medians = steps(groups, NETWORKS[name], options.steps, options.rounds)
        if dist.get_rank() == 0:
            row = " ".join(f"{1e3 * medians[each]:>12.1f}" for each in columns)
            print(f"{name:>8} {row} {medians['ddl adds'] / medians['gloo adds']:>6.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
