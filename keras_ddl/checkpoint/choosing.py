"""Chooses a checkpoint of a directory: the latest, the best, or that of a step."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NoReturn

from keras_ddl.checkpoint.direction import resolve_mode
from keras_ddl.checkpoint.listing import NAME, Checkpoint, list_checkpoints
from keras_ddl.errors import CheckpointError


def latest(ckpt_dir: str | Path) -> Checkpoint:
    """Returns the checkpoint with the highest step. Raises: CheckpointError: there is none, or it is damaged."""
    return require_intact(_some(ckpt_dir)[-1])


def best(ckpt_dir: str | Path, metric: str | None = None, mode: str = "auto") -> Checkpoint:
    """Returns the intact checkpoint with the best value of `metric`; of equal ones, the latest.

    Args:
        metric: a key of the saved metrics; default: the newest checkpoint's `monitor`.
        mode: 'min', 'max', or 'auto': as saved for this metric, else by its exact name (`resolve_mode`).
    Raises: CheckpointError: there is no checkpoint, none has a finite value of `metric`, or 'auto' does not know the
        name.
    """
    everything = _some(ckpt_dir)
    intact = [each for each in everything if each.problem is None] or [require_intact(everything[-1])]
    if metric is None:
        metric = next((each.monitor for each in reversed(intact) if each.monitor), None) or "val_loss"
    if mode not in ("auto", "min", "max"):
        raise CheckpointError(f"mode must be 'auto', 'min' or 'max'. Received: mode={mode!r}.")
    candidates = [each for each in intact if has_finite(each, metric)]
    if not candidates:
        known = sorted({name for each in intact for name in each.metrics or {}})
        raise CheckpointError(
            f"'best' needs a metric that the checkpoints hold. Received: metric={metric!r}; checkpoints in {ckpt_dir} "
            f"hold {known or 'no metrics'}. Choose one of these metrics, 'latest' or a step."
        )
    if mode == "auto":
        saved = (each.mode for each in reversed(intact) if each.monitor == metric and each.mode)
        mode = next(saved, None) or resolve_mode(metric)
    sign = 1.0 if mode == "max" else -1.0
    return max(candidates, key=lambda each: (sign * (each.metrics or {})[metric], each.step))


def find(
    ckpt_dir: str | Path, which: str | int = "latest", metric: str | None = None, mode: str = "auto"
) -> Checkpoint:
    """Returns a checkpoint. `which`: 'latest', 'best' (see `best`) or a step.

    Raises: CheckpointError: there is no such checkpoint, or sizes show that it is damaged (`validate` reads the
        contents).
    """
    if which == "latest":
        return latest(ckpt_dir)
    if which == "best":
        return best(ckpt_dir, metric, mode)
    steps = [each.step for each in _some(ckpt_dir)]
    if not re.fullmatch(r"\d+", str(which)):
        raise CheckpointError(
            f"--which (which=) must be 'latest', 'best' or a step. Received: {which!r}. Steps in {ckpt_dir}: "
            f"{_few(steps)}."
        )
    for each in list_checkpoints(ckpt_dir):
        if each.step == int(which):
            return require_intact(each)
    raise CheckpointError(f"'which' must be a saved step. Received: {which}. Steps in {ckpt_dir}: {_few(steps)}.")


def _some(ckpt_dir: str | Path) -> list[Checkpoint]:
    checkpoints = list_checkpoints(ckpt_dir)
    if not checkpoints and NAME.match(Path(ckpt_dir).resolve().name):
        raise CheckpointError(
            "A checkpoint directory must hold ckpt-<step> directories. Received: one of these, "
            f"{ckpt_dir}. Give the directory that holds it, and choose it there: `keras-ddl export --which STEP`."
        )
    if not checkpoints:
        here = sorted(entry.name for entry in Path(ckpt_dir).iterdir() if not entry.name.startswith("."))
        raise CheckpointError(
            f"A checkpoint directory must hold ckpt-<step> directories. Received: {ckpt_dir} with no checkpoint "
            f"(holds: {', '.join(here[:8]) or 'nothing'}). Train with callbacks.Checkpoint until it has written one "
            "(by default at the end of an epoch), or give another directory."
        )
    return checkpoints


def require_intact(checkpoint: Checkpoint) -> Checkpoint:
    if checkpoint.problem is not None:
        refuse(checkpoint.path, checkpoint.problem)
    return checkpoint


def refuse(path: Path, problem: str) -> NoReturn:
    others = [each.step for each in list_checkpoints(path.parent) if each.problem is None and each.path != path]
    remedy = f"use an earlier step ({_few(others)} look complete)" if others else "there is no other checkpoint there"
    raise CheckpointError(
        f"A checkpoint must be complete to be read. Received: {path}: {problem}. Copy it again or remove it; {remedy}."
    )


def has_finite(checkpoint: Checkpoint, metric: str) -> bool:
    return math.isfinite((checkpoint.metrics or {}).get(metric, math.nan))


def _few(steps: list[int]) -> str:
    return ", ".join(map(str, steps[-8:])) or "none"
