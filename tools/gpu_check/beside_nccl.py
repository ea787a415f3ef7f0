"""Trains by DistributedDataParallel and FSDP2 with backend "ddl" on two ranks of one GPU, and by NCCL's backend.

NCCL may refuse two ranks on one GPU. The program tries two to record the error, and compares with one rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from torch import nn

ROWS, STEPS = 64, 12


def network(where: torch.device) -> nn.Sequential:
    torch.manual_seed(7)
    layers: list[nn.Module] = [nn.Linear(64, 1024), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)).double().to(where)


def in_rank(backend: str, kind: str) -> None:
    if backend == "ddl":
        import keras_ddl.torch  # noqa: F401  (registers the backend)
    where = ranks.device()
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    model: nn.Module = network(where)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        wrapped = model
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses, times = [], []
    for _ in range(STEPS):
        x = torch.randn(ROWS, 64, generator=generator, dtype=torch.float64).to(where)
        y = torch.randint(10, (ROWS,), generator=generator).to(where)
        own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
        ranks.synchronize(where)
        begun = time.monotonic()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(x[own]), y[own])
        loss.backward()
        optimizer.step()
        ranks.synchronize(where)
        times.append(time.monotonic() - begun)
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / size)
    if rank == 0:
        print(f"LOSSES {' '.join(f'{each:.12f}' for each in losses)}")
        print(f"median step {1e3 * sorted(times)[len(times) // 2]:.1f} ms")
    dist.destroy_process_group()


def torchrun(count: int, kind: str) -> str:
    """Runs NCCL's backend, or gloo's in a rehearsal."""
    backend = "nccl" if ranks.ON_GPU else "gloo"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = os.environ | {
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # lets later versions of NCCL run two ranks on one GPU
    }
    try:
        done = subprocess.run(
            [*command, __file__, "--rank", backend, kind],
            env=environment,
            timeout=40 * ranks.SLOWNESS,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(f"-- {count} rank(s) of {backend}, {kind}: code {done.returncode}")
        return done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        return f"took too long: {late.stdout!r}"


def losses_of(text: str) -> list[float]:
    line = next((line for line in text.splitlines() if "LOSSES" in line), "")
    if not line:
        print(text[-3000:])
    else:
        print(*(each for each in text.splitlines() if "median step" in each))
    return [float(each) for each in line.split("LOSSES")[-1].split()]


def main() -> int:
    wrong = 0
    for kind in ("ddp", "fsdp2"):
        peer = losses_of(torchrun(1, kind))
        ours = losses_of(ranks.launch(2, __file__, "--rank", "ddl", kind, seconds=40)[1])
        difference = max((abs(a - b) for a, b in zip(ours, peer)), default=float("nan"))
        good = len(ours) == len(peer) == STEPS and difference < 1e-9
        wrong += not good
        print(
            f"{'passed' if good else 'FAILED'}: {kind} on 2 ranks, loss differs by {difference:.3g} from 1 of the peer"
        )
    refusal = torchrun(2, "ddp")
    lines = [line for line in refusal.splitlines() if "uplicate" in line or "LOSSES" in line]
    print("two ranks of the peer on one GPU:", *(lines[:2] or [refusal[-500:]]))
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        in_rank(*sys.argv[2:])
    else:
        sys.exit(main())
