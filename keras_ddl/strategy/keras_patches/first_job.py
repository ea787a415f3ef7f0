"""Prints, at the end of a machine's first job, where the time went and how to see more."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def say(until_fit: float, until_step: float, rest: float, steps: int) -> None:
    """Prints the line, unless an earlier job of this user has printed it on this machine.

    Args:
        until_fit, until_step, rest: seconds from the start of the process to fit, from there to the end of the first
            step, and from there to the end of fit.
        steps: training steps after the first one.
    """
    if not _is_first():
        return
    each = f", {1000 * rest / steps:.0f} ms each with validation and callbacks" if steps else ""
    print(
        f"keras_ddl: {until_fit:.0f} s until fit began, {until_step:.0f} s for the first step, which is traced, "
        f"{rest:.0f} s for {steps} more{each}. (Printed once per user of a machine. To see what a step does: "
        "KERAS_DDL_TIMELINE=t.json, then `keras-ddl trace summary t.json`.)",
        flush=True,
    )


def seconds_since_start() -> float:
    """Returns the age of this process."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _is_first() -> bool:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "keras_ddl"
    with contextlib.suppress(OSError, RuntimeError):  # without a writable home directory nothing can be remembered
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "first-job").touch(exist_ok=False)
        return True
    return False
