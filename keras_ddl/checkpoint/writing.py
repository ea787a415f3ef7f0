"""Writes checkpoints, and removes or sets aside old ones."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keras_ddl.checkpoint import listing
from keras_ddl.checkpoint.choosing import best, has_finite
from keras_ddl.checkpoint.direction import resolve_mode
from keras_ddl.checkpoint.listing import Checkpoint
from keras_ddl.errors import CheckpointError
from keras_ddl.files import digests, durable

_WHAT = "A checkpoint"


def write(
    ckpt_dir: str | Path,
    step: int,
    fill: Callable[[Path], Mapping[str, Any] | None],
    *,
    epoch: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    monitor: str | None = None,
    mode: str = "auto",
    extra: Mapping[str, Any] | None = None,
    staged: Path | None = None,
    synced: bool = True,
) -> Checkpoint:
    """Writes one checkpoint atomically and durably; a checkpoint of the same step is replaced.

    Args:
        fill: writes files into the directory that it is called with; returns further entries of state.json.
        staged: a directory of `durable.make_staging(ckpt_dir)`, into which other ranks have written their parts.
        synced: wait until it is on disk. Otherwise it survives the process, but not the host.
        extra: JSON values of the caller, returned by `restore_checkpoint` (`Checkpoint.extra`).
    Raises: CheckpointError: the directory cannot be created or written, or the disk is full; nothing is left behind.
    """
    root = durable.make_directory(Path(ckpt_dir), _WHAT, CheckpointError)
    final = listing.path_of(root, step)
    state: dict[str, Any] = {
        "format": listing.FORMAT,
        "step": int(step),
        "epoch": None if epoch is None else int(epoch),
        "metrics": {name: _storable(name, value) for name, value in (metrics or {}).items()},
        "monitor": monitor,
        "mode": resolve_mode(monitor, mode) if monitor else None,
        "saved_at": time.time(),
        "extra": dict(extra or {}),
    }
    try:
        json.dumps(state["extra"])
    except TypeError as error:
        raise CheckpointError(f"extra must be JSON values. Received: {extra!r} ({error}). Convert it first.") from error
    try:
        with durable.staging_directory(root, staged) as folder:
            state.update(fill(folder) or {})
            state["files"] = digests.inventory(folder)
            (folder / listing.STATE).write_text(json.dumps(digests.sealed(state), indent=1))
            durable.publish(folder, final, replace=True, synced=synced)
    except OSError as error:
        raise CheckpointError(durable.explain(error, _WHAT, final)) from error
    return listing.read_checkpoint(final, step)


def prune(ckpt_dir: str | Path, keep: int, keep_best: tuple[str, str] | None = None) -> list[int]:
    """Removes all but the newest `keep` intact checkpoints and the best one. Returns the removed steps.

    Args:
        keep: at least 1. Damaged checkpoints older than the newest intact one are removed too.
        keep_best: (metric, mode) of the best checkpoint, which stays.
    A checkpoint that is being exported (`durable.being_read`) stays until the next call.
    """
    if keep < 1:
        raise CheckpointError(f"keep must be the number of checkpoints to keep, 1 or more. Received: keep={keep!r}.")
    everything = listing.list_checkpoints(ckpt_dir)
    intact = [each for each in everything if each.problem is None]
    stay = {each.step for each in intact[-keep:]}
    if keep_best and any(has_finite(each, keep_best[0]) for each in intact):
        stay.add(best(ckpt_dir, *keep_best).step)
    removed = []
    for each in everything:
        is_old = intact and each.step < intact[-1].step and each.step not in stay
        if is_old and durable.remove_unless_read(each.path):
            removed.append(each.step)
    return removed


def sweep_temporaries(ckpt_dir: str | Path) -> list[str]:
    """Removes what killed writers left behind; call it on rank 0 when training begins. Returns the removed names."""
    return durable.sweep_temporaries(Path(ckpt_dir))


def set_aside(ckpt_dir: str | Path) -> Path | None:
    """Moves the base graph and the checkpoints of an earlier run into `previous-<n>/`, itself a checkpoint directory.

    For a new run in a used directory: nothing is lost, and 'latest' cannot return another run's weights. Call it
    before the new base graph is written. If it is killed, the next call continues.
    Returns: the new directory, or None when there was nothing to move.
    """
    root = Path(ckpt_dir)
    entries = sorted(root.iterdir()) if root.is_dir() else []
    moving = next((entry for entry in entries if re.fullmatch(r"previous-\d+\.moving", entry.name)), None)
    names = [entry for entry in entries if listing.NAME.match(entry.name)]
    if not names and moving is None:
        return None
    try:
        if moving is None:
            taken = [int(match[1]) for entry in entries if (match := re.fullmatch(r"previous-(\d+)", entry.name))]
            moving = root / f"previous-{max(taken, default=0) + 1}.moving"
            moving.mkdir()
        for entry in [*names, *(root / listing.base_directory(name) for name in listing.list_bases(root))]:
            if entry.exists():
                entry.rename(moving / entry.name)
        durable.sync_file(moving)
        final = moving.with_suffix("")
        moving.rename(final)
        durable.sync_file(root)
    except OSError as error:
        raise CheckpointError(durable.explain(error, _WHAT, root)) from error
    return final


def _storable(name: str, value: Any) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"A metric must be one number. Received: {name}={value!r}. Leave it out of metrics=."
        ) from error
    return number if math.isfinite(number) else repr(number)  # JSON has no NaN; float('nan') reads it back
