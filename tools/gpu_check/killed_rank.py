"""Kills a rank in the middle of collectives on the GPU; the other must get the error within seconds."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import ranks


def in_rank() -> None:
    import torch
    import torch.distributed as dist

    import keras_ddl.errors
    import keras_ddl.torch

    where = ranks.device()
    dist.init_process_group("ddl")
    tensor = torch.ones(4_000_000, device=where)
    for step in range(10_000):
        if step == 30 and dist.get_rank() == 1:
            print(f"KILLED at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
        except RuntimeError as error:
            lost = keras_ddl.errors.lost_rank_behind(error)
            print(f"RAISED at {time.time()} in step {step}: {lost!r} behind {error}", flush=True)
            ranks.synchronize(where)  # checks that the GPU is still usable
            print("the GPU still computes", tensor.sum().item(), flush=True)
            return
    print("no error was raised")


def main() -> int:
    code, text = ranks.launch(2, __file__, "--rank", seconds=30)
    print(text[-5000:])
    times = {name: float(at) for name, at in re.findall(r"(KILLED|RAISED) at ([\d.]+)", text)}
    if set(times) != {"KILLED", "RAISED"}:
        return 1
    seconds = times["RAISED"] - times["KILLED"]
    print(f"the other rank had the error {seconds:.2f} s after the kill; the job ended with code {code}")
    return 0 if 0 <= seconds < 10 and code != 0 else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        in_rank()
    else:
        sys.exit(main())
