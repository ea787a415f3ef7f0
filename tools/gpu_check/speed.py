"""Times all_reduce of GPU tensors: "ddl" staged against gloo on two ranks, "ddl" by NCCL against NCCL on one rank.

Prints ratios, and the bound measured in the same run: copies to and from page-locked memory of the host.
"""

from __future__ import annotations

import json
import sys
import time

import ranks
import torch
import torch.distributed as dist

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28)


def seconds_of(function, where: torch.device, limit: float = 0.7) -> float:
    """Returns the median time of several calls."""
    times: list[float] = []
    end = time.monotonic() + limit
    for _ in range(3):
        function()
    ranks.synchronize(where)
    count = torch.zeros(1)
    while len(times) < 5 or (len(times) < 50 and count.item() == 0):
        begun = time.monotonic()
        function()
        ranks.synchronize(where)
        times.append(time.monotonic() - begun)
        # Makes all ranks stop together.
        count.fill_(float(time.monotonic() > end))
        dist.all_reduce(count, dist.ReduceOp.MAX, group=AGREE)
    return sorted(times)[len(times) // 2]


def in_rank(own: str, peer: str) -> None:
    global AGREE
    import keras_ddl.torch  # noqa: F401  (registers the backend)

    where = ranks.device()
    dist.init_process_group("ddl")
    AGREE = dist.new_group(backend="gloo")
    other = dist.new_group(backend=peer)
    for size in SIZES if where.type == "cuda" else SIZES[:4]:
        tensor = torch.ones(size // 4, device=where)
        ours = seconds_of(lambda t=tensor: dist.all_reduce(t, dist.ReduceOp.AVG), where)
        try:
            theirs = seconds_of(lambda t=tensor: dist.all_reduce(t, group=other), where)
        except RuntimeError as error:
            print(f"{peer}: {error}")
            theirs = float("nan")
        host = torch.empty(size // 4, pin_memory=where.type == "cuda")

        def copy(tensor=tensor, host=host):
            host.copy_(tensor, non_blocking=True)
            tensor.copy_(host, non_blocking=True)

        copies = seconds_of(copy, where)
        if dist.get_rank() == 0:
            print("ROW " + json.dumps([size, ours, theirs, copies]), flush=True)
    counts = dist.group.WORLD._engine.comm.native().count()
    if dist.get_rank() == 0:
        print(f"staged {counts['staged']}, by NCCL {counts['by_device']}; {own} against {peer}")
    dist.destroy_process_group()


def main() -> int:
    wrong = 0
    for count, own, peer in ((2, "staged", "gloo"), (1, "nccl", "nccl" if ranks.ON_GPU else "gloo")):
        code, text = ranks.launch(count, __file__, "--rank", own, peer, seconds=45, KERAS_DDL_DEVICE=own)
        rows = [json.loads(line.split("ROW ")[1]) for line in text.splitlines() if "ROW " in line]
        print(f"{'bytes':>12} {'ddl ' + own:>14} {peer:>14} {'times faster':>14} {'copies alone':>14}")
        for size, ours, theirs, copies in rows:
            times = [f"{1e6 * each:11.0f} us" for each in (ours, theirs, copies)]
            print(f"{size:12} {times[0]} {times[1]} {theirs / ours:14.2f} {times[2]}")
        print(*(line for line in text.splitlines() if "staged" in line and "against" in line))
        if code or not rows:
            wrong += 1
            print(text[-3000:])
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        in_rank(*sys.argv[2:])
    else:
        sys.exit(main())
