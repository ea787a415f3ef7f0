"""Checkpoints on disk: which there are, which is the latest and the best, and that each is whole.

    ckpt/ckpt-00000120/          one checkpoint: step 120
        weights.index, .data-*   a TensorFlow bundle, keyed as the base graph's variables (keras_ddl/model_state.py)
        optimizer.index, .data-* the optimizer's state, for an exact resume
        golden.npz               what the base graph answers to the stored sample with these weights
        progress.json, .npz      what a run is besides its variables (resuming/progress.py)
        state.json               step, epoch, metrics, size and SHA-256 of every file, and of itself
    ckpt/base/                   the servable graph (keras_ddl.export); base-<name>/ that of a part of the model
    ckpt/previous-1/             an earlier run's base and checkpoints (`set_aside`)

A checkpoint is filled under a hidden name, synced and renamed, so a writer killed at any moment leaves no half
checkpoint under its real name. One process writes (rank 0); any number may read. No Keras and no TensorFlow in this
file: `model_state.save_checkpoint` and `restore_checkpoint` move a model in and out of it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl.checkpoint.direction import direction_of_name
from keras_ddl.errors import CheckpointError
from keras_ddl.files import digests, durable

FORMAT = 1
STATE = "state.json"
BASE = "base"
_WHAT = "A checkpoint"
_BASES = re.compile(rf"^{BASE}(-([\w-]+))?$", re.ASCII)
_NAME = re.compile(r"^ckpt-(\d{8,})(\.replaced)?$")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint directory. `problem` says why it cannot be read, or is None; `epoch` counts finished epochs."""

    path: Path
    step: int
    epoch: int | None = None
    metrics: Mapping[str, float] | None = None
    monitor: str | None = None
    mode: str | None = None
    saved_at: float = 0.0
    extra: Mapping[str, Any] | None = None
    state: Mapping[str, Any] | None = field(default=None, repr=False)
    problem: str | None = None

    @property
    def weights(self) -> str:
        """Prefix of the bundle of weights."""
        return str(self.path / "weights")

    @property
    def optimizer(self) -> str:
        """Prefix of the bundle of the optimizer's state."""
        return str(self.path / "optimizer")


def path_of(ckpt_dir: str | Path, step: int) -> Path:
    """Returns where the checkpoint of a step is, or will be."""
    return Path(ckpt_dir) / f"ckpt-{step:08d}"


def list_checkpoints(ckpt_dir: str | Path) -> list[Checkpoint]:
    """Returns the checkpoints of a directory in order of step, also damaged ones (see `Checkpoint.problem`).

    Only sizes are compared here, not contents (`validate`). What a killed writer left is not listed.
    Raises: CheckpointError: `ckpt_dir` does not exist or is a file.
    """
    root = _existing(ckpt_dir)
    while True:
        found: dict[int, Path] = {}
        for entry in sorted(root.iterdir()):
            match = _NAME.match(entry.name)
            # `.replaced` sorts after the name it stands in for and counts only while that one is missing.
            if match and entry.is_dir():
                found.setdefault(int(match[1]), entry)
        read = [_read(path, step) for step, path in sorted(found.items())]
        # The writer may have pruned or replaced one meanwhile: that is no damage. Then look again.
        if all(each.problem is None or each.path.is_dir() for each in read):
            return read


def latest(ckpt_dir: str | Path) -> Checkpoint:
    """Returns the checkpoint of the highest step. Raises: CheckpointError: there is none, or it is damaged."""
    return _whole(_some(ckpt_dir)[-1], ckpt_dir)


def best(ckpt_dir: str | Path, metric: str | None = None, mode: str = "auto") -> Checkpoint:
    """Returns the whole checkpoint with the best value of `metric`, the later one of equals.

    Args:
        metric: a key of the saved metrics; by default the one the newest checkpoint was saved to monitor.
        mode: 'min', 'max', or 'auto': as saved for this metric, else by its exact name (`resolve_mode`).
    Raises: CheckpointError: no checkpoint, none holds a finite value of `metric`, or 'auto' does not know the name.
    """
    everything = _some(ckpt_dir)
    whole = [each for each in everything if each.problem is None] or [_whole(everything[-1], ckpt_dir)]
    if metric is None:
        metric = next((each.monitor for each in reversed(whole) if each.monitor), None) or "val_loss"
    if mode not in ("auto", "min", "max"):
        raise CheckpointError(f"mode is one of 'auto', 'min', 'max'. Received: {mode!r}.")
    holding = [each for each in whole if _finite(each, metric)]
    if not holding:
        known = sorted({name for each in whole for name in each.metrics or {}})
        raise CheckpointError(
            f"'best' compares a metric that the checkpoints hold. Received: metric={metric!r}; checkpoints in "
            f"{ckpt_dir} hold {known or 'no metrics'}. Choose one of these, 'latest' or a step."
        )
    if mode == "auto":
        saved = (each.mode for each in reversed(whole) if each.monitor == metric and each.mode)
        mode = next(saved, None) or resolve_mode(metric)
    sign = 1.0 if mode == "max" else -1.0
    return max(holding, key=lambda each: (sign * (each.metrics or {})[metric], each.step))


def find(
    ckpt_dir: str | Path, which: str | int = "latest", metric: str | None = None, mode: str = "auto"
) -> Checkpoint:
    """Returns the checkpoint that `which` names: 'latest', 'best' (see `best`) or a step.

    Raises: CheckpointError: no such checkpoint, or it is damaged (sizes only; `validate` reads the contents).
    """
    if which == "latest":
        return latest(ckpt_dir)
    if which == "best":
        return best(ckpt_dir, metric, mode)
    steps = [each.step for each in _some(ckpt_dir)]
    if not re.fullmatch(r"\d+", str(which)):
        raise CheckpointError(
            f"--which (which=) is 'latest', 'best' or a step. Received: {which!r}. Steps in {ckpt_dir}: {_few(steps)}."
        )
    for each in list_checkpoints(ckpt_dir):
        if each.step == int(which):
            return _whole(each, ckpt_dir)
    raise CheckpointError(
        f"'which' names a step that was saved. Received: {which}. Steps in {ckpt_dir}: {_few(steps)}."
    )


def resolve_mode(metric: str, mode: str = "auto") -> str:
    """Returns 'min' or 'max'; 'auto' goes by the exact name (`accuracy`, `auc`, `loss`, `<any>_loss`, ...).

    Raises: CheckpointError: 'auto' does not know the name.
    """
    known = direction_of_name(metric) if mode == "auto" else mode
    if known is None:
        raise CheckpointError(
            f"The best checkpoint is that of the lowest or of the highest value of a metric, and the name must say "
            f"which. Received: {metric!r}, not a name that Keras gives. Say mode='min' or mode='max' (--mode)."
        )
    return known


def validate(checkpoint: Checkpoint) -> None:
    """Reads every file of a checkpoint and compares it with its SHA-256. Cost: one read, some 1 GB/s.

    Raises: CheckpointError: a file is missing, cut short or altered.
    """
    _whole(checkpoint, checkpoint.path.parent)
    problem = digests.difference(checkpoint.path, (checkpoint.state or {})["files"], contents=True)
    if problem is not None:
        _refuse(checkpoint.path, problem)


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
) -> Checkpoint:
    """Writes one checkpoint atomically and durably; one of the same step is replaced.

    Args:
        fill: writes its files into the directory it is given; what it returns is added to state.json.
        extra: JSON values of the caller, returned by `restore_checkpoint` (`Checkpoint.extra`).
    Raises: CheckpointError: the directory cannot be made or written to, or the disk is full; nothing is left behind.
    """
    root = durable.make_directory(Path(ckpt_dir), _WHAT, CheckpointError)
    final = path_of(root, step)
    state: dict[str, Any] = {
        "format": FORMAT,
        "step": int(step),
        "epoch": None if epoch is None else int(epoch),
        "metrics": {name: _storable(name, value) for name, value in (metrics or {}).items()},
        "monitor": monitor,
        "mode": resolve_mode(monitor, mode) if monitor else None,
        "saved_at": time.time(),
        "extra": dict(extra or {}),
    }
    try:
        with durable.staging_directory(root) as staged:
            state.update(fill(staged) or {})
            state["files"] = digests.inventory(staged)
            (staged / STATE).write_text(json.dumps(digests.sealed(state), indent=1))
            durable.publish(staged, final, replace=True)
    except OSError as error:
        raise CheckpointError(durable.explain(error, _WHAT, final)) from error
    except TypeError as error:
        raise CheckpointError(f"extra holds JSON values. Received: {extra!r} ({error}). Convert it first.") from error
    return _read(final, step)


def prune(ckpt_dir: str | Path, keep: int, keep_best: tuple[str, str] | None = None) -> list[int]:
    """Removes all but the newest `keep` whole checkpoints and the best one. Returns the steps removed.

    Args:
        keep: at least 1. Damaged checkpoints older than the newest whole one are removed too.
        keep_best: (metric, mode) of the checkpoint to keep beside them.
    One that is being exported (`durable.being_read`) stays until the next time.
    """
    if keep < 1:
        raise CheckpointError(f"keep counts the checkpoints that stay: 1 or more. Received: {keep}.")
    everything = list_checkpoints(ckpt_dir)
    whole = [each for each in everything if each.problem is None]
    stay = {each.step for each in whole[-keep:]}
    if keep_best and any(_finite(each, keep_best[0]) for each in whole):
        stay.add(best(ckpt_dir, *keep_best).step)
    removed = []
    for each in everything:
        is_old = whole and each.step < whole[-1].step and each.step not in stay
        if is_old and durable.remove_unless_read(each.path):
            removed.append(each.step)
    return removed


def sweep_temporaries(ckpt_dir: str | Path) -> list[str]:
    """Removes what killed writers left; call it on rank 0 when training begins. Returns the names removed."""
    return durable.sweep_temporaries(Path(ckpt_dir))


def set_aside(ckpt_dir: str | Path) -> Path | None:
    """Moves the base graph and the checkpoints of an earlier run into `previous-<n>/`, itself a checkpoint directory.

    For a run that starts anew in a used directory: nothing is lost, and 'latest' cannot name another run's weights.
    Call it before the new base graph is written. Killed half-way, the next call goes on where it stopped.
    Returns: the new directory, or None when there was nothing to move.
    """
    root = Path(ckpt_dir)
    entries = sorted(root.iterdir()) if root.is_dir() else []
    moving = next((entry for entry in entries if re.fullmatch(r"previous-\d+\.moving", entry.name)), None)
    names = [entry for entry in entries if _NAME.match(entry.name)]
    if not names and moving is None:
        return None
    try:
        if moving is None:
            taken = [int(match[1]) for entry in entries if (match := re.fullmatch(r"previous-(\d+)", entry.name))]
            moving = root / f"previous-{max(taken, default=0) + 1}.moving"
            moving.mkdir()
        for entry in [*names, *(root / base_directory(name) for name in list_bases(root))]:
            if entry.exists():
                entry.rename(moving / entry.name)
        durable.sync_file(moving)
        final = moving.with_suffix("")
        moving.rename(final)
        durable.sync_file(root)
    except OSError as error:
        raise CheckpointError(durable.explain(error, _WHAT, root)) from error
    return final


def base_directory(name: str | None) -> str:
    """Returns the name of the directory of the base graph of a model, or of the part of that name."""
    return BASE if name is None else f"{BASE}-{name}"


def list_bases(ckpt_dir: str | Path) -> list[str | None]:
    """Returns the names of the parts of a model whose base graphs a directory holds; None for the model's own."""
    found = (_BASES.match(entry.name.removesuffix(durable.REPLACED)) for entry in Path(ckpt_dir).iterdir())
    return sorted({match[2] for match in found if match}, key=lambda name: name or "")


def _existing(ckpt_dir: str | Path) -> Path:
    root = Path(ckpt_dir)
    if not root.is_dir():
        received = "a file" if root.exists() else "nothing there"
        raise CheckpointError(
            f"A checkpoint directory must exist to be read. Received: {root} ({received}). Give the directory that "
            "callbacks.Checkpoint was given."
        )
    return root


def _some(ckpt_dir: str | Path) -> list[Checkpoint]:
    found = list_checkpoints(ckpt_dir)
    if not found:
        here = sorted(entry.name for entry in Path(ckpt_dir).iterdir() if not entry.name.startswith("."))
        raise CheckpointError(
            f"A checkpoint directory holds ckpt-<step> directories. Received: {ckpt_dir} with no checkpoint "
            f"(holds: {', '.join(here[:8]) or 'nothing'}). Train with callbacks.Checkpoint, or give another directory."
        )
    return found


def _read(path: Path, step: int) -> Checkpoint:
    try:
        state = json.loads((path / STATE).read_text())
    except FileNotFoundError:
        return Checkpoint(path, step, problem=f"{STATE} is missing")
    except (ValueError, OSError) as error:
        return Checkpoint(path, step, problem=f"{STATE} cannot be read ({error})")
    if not digests.is_sealed(state):
        return Checkpoint(path, step, problem=f"{STATE} was altered after it was written (its SHA-256 differs)")
    if state["format"] != FORMAT or state["step"] != step:
        received = f"format {state['format']} and step {state['step']}, not {FORMAT} and {step}"
        return Checkpoint(path, step, problem=f"{STATE} is of {received}")
    return Checkpoint(
        path,
        step,
        epoch=state["epoch"],
        metrics={name: float(value) for name, value in state["metrics"].items()},
        monitor=state["monitor"],
        mode=state["mode"],
        saved_at=state["saved_at"],
        extra=state["extra"],
        state=state,
        problem=digests.difference(path, state["files"], contents=False),
    )


def _whole(checkpoint: Checkpoint, ckpt_dir: str | Path) -> Checkpoint:
    if checkpoint.problem is not None:
        _refuse(checkpoint.path, checkpoint.problem)
    return checkpoint


def _refuse(path: Path, problem: str) -> None:
    others = [each.step for each in list_checkpoints(path.parent) if each.problem is None and each.path != path]
    remedy = f"use an earlier step ({_few(others)} look complete)" if others else "there is no other checkpoint there"
    raise CheckpointError(
        f"A checkpoint must be complete to be read. Received: {path}: {problem}. Copy it again or remove it; {remedy}."
    )


def _finite(checkpoint: Checkpoint, metric: str) -> bool:
    return math.isfinite((checkpoint.metrics or {}).get(metric, math.nan))


def _storable(name: str, value: Any) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"A metric must be one number. Received: {name}={value!r}. Leave it out of metrics=."
        ) from error
    return number if math.isfinite(number) else repr(number)  # JSON has no NaN; float('nan') reads it back


def _few(steps: list[int]) -> str:
    return ", ".join(map(str, steps[-8:])) or "none"
