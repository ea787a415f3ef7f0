"""Reports a rank's progress to watchers of the job, through files in KERAS_DDL_RUN_DIR.

The rank's wrapper makes an empty file for each kind of news that a watcher wants (launch/rank_news.py), and reads the
files once a second. The program writes only to files that exist; neither side waits for the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIGURES = "figures"  # the newest figures of the training (strategy/figures.py)
CHECKPOINTS = "checkpoints.jsonl"  # a line per complete checkpoint
_HEAD = struct.Struct("!IQ")  # header of the figures: checksum and length of the rest
_MOST_BYTES = 1 << 16


def is_wanted(run_dir: str | None, name: str) -> bool:
    """Whether a watcher wants `name`. `run_dir`: this rank's folder; None without a launcher."""
    return run_dir is not None and Path(run_dir, name).exists()


def write_figures(run_dir: str, figures: Mapping[str, object]) -> None:
    """Overwrites the figures; a failure is ignored. Cost: 6 us.

    It does not rename a new file into place, because file systems then write to disk at once, which takes milliseconds.
    """
    body = json.dumps(figures).encode()
    with contextlib.suppress(OSError):
        descriptor = os.open(f"{run_dir}/{FIGURES}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, _HEAD.pack(zlib.crc32(body), len(body)) + body, 0)
        finally:
            os.close(descriptor)


def read_figures(run_dir: Path) -> dict[str, Any] | None:
    """Returns the current figures; None: there are none, or they are being written."""
    try:
        data = (run_dir / FIGURES).read_bytes()
        checksum, size = _HEAD.unpack_from(data)
        body = data[_HEAD.size :][:size]
        figures = json.loads(body) if size == len(body) <= _MOST_BYTES and zlib.crc32(body) == checksum else None
    except (OSError, ValueError, struct.error):
        return None
    return figures if isinstance(figures, dict) else None


def add_checkpoint(run_dir: str, checkpoint: Mapping[str, object]) -> None:
    """Adds a line for a checkpoint if a watcher wants it; a failure is ignored."""
    with contextlib.suppress(OSError):
        descriptor = os.open(Path(run_dir, CHECKPOINTS), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, json.dumps(checkpoint).encode() + b"\n")
        finally:
            os.close(descriptor)
