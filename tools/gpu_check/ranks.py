"""Helpers for the programs of tools/gpu_check: choose the device, start ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ON_GPU = os.environ.get("GPU_CHECK_DEVICE", "cuda") != "cpu"  # False in a rehearsal without a GPU
SLOWNESS = float(os.environ.get("GPU_CHECK_SLOWNESS", "1"))


def device() -> torch.device:
    """Returns this rank's device. Ranks share GPUs if there are too few."""
    import torch

    if not ON_GPU:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    where = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=where)  # else init_device_mesh uses LOCAL_RANK as the device's number
    return where


def launch(count: int, program: Path | str, *arguments: str, seconds: float = 60, **variables: str) -> tuple[int, str]:
    """Runs `program` on `count` ranks with `keras-ddl run`. Returns its exit status (124: too slow) and output."""
    command = [sys.executable, "-m", "keras_ddl.cli", "run", "-np", str(count), sys.executable, str(program)]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *arguments],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds * SLOWNESS,
            check=False,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = 124, late.stdout or b""
    print(
        f"-- {count} rank(s) of {Path(program).name} {' '.join(arguments)} {variables}: code {code}, "
        f"{time.monotonic() - started:.1f} s",
        flush=True,
    )
    return code, output.decode(errors="replace")


def synchronize(where: torch.device) -> None:
    import torch

    if where.type == "cuda":
        torch.cuda.synchronize(where)
