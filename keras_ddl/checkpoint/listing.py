"""Lists the checkpoints and base graphs of a directory, with the problems of damaged ones."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl.errors import CheckpointError
from keras_ddl.files import digests, durable, foreign

FORMAT = 1
STATE = "state.json"
BASE = "base"
NAME = re.compile(r"^ckpt-(\d{8,})(\.replaced)?$")
_BASES = re.compile(rf"^{BASE}(-([\w-]+))?$", re.ASCII)
_ENTRIES = {"format", "step", "epoch", "metrics", "monitor", "mode", "saved_at", "extra", "files"}


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint directory. `problem`: why it cannot be read, or None; `epoch`: number of finished epochs."""

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
    """Returns the directory of the checkpoint of a step, which need not exist."""
    return Path(ckpt_dir) / f"ckpt-{step:08d}"


def list_checkpoints(ckpt_dir: str | Path) -> list[Checkpoint]:
    """Returns the checkpoints of a directory in order of step, including damaged ones (see `Checkpoint.problem`).

    Checks sizes of files, not their contents (`validate` does). Does not list what killed writers left behind.
    Raises: CheckpointError: `ckpt_dir` does not exist or is a file.
    """
    root = _existing(ckpt_dir)
    while True:
        paths: dict[int, Path] = {}
        matches = [(entry, match) for entry in sorted(root.iterdir()) if (match := NAME.match(entry.name))]
        for entry, match in matches:
            # `.replaced` sorts after the name it replaces, and counts only while that is missing.
            if entry.is_dir() or entry.is_symlink():
                paths.setdefault(int(match[1]), entry)
        read = [read_checkpoint(path, step) for step, path in sorted(paths.items())]
        # If the writer has pruned or replaced one before it was read, read again.
        intact = {each.path for each in read if each.problem is None}
        if all(entry in intact or os.path.lexists(entry) for entry, _ in matches):
            return read


def base_directory(name: str | None) -> str:
    """Returns the name of the directory of the base graph of a model, or of the part of that name."""
    return BASE if name is None else f"{BASE}-{name}"


def list_bases(ckpt_dir: str | Path) -> list[str | None]:
    """Returns the parts of a model that have base graphs in a directory; None stands for the model itself."""
    matches = (_BASES.match(entry.name.removesuffix(durable.REPLACED)) for entry in Path(ckpt_dir).iterdir())
    return sorted({match[2] for match in matches if match}, key=lambda name: name or "")


def _existing(ckpt_dir: str | Path) -> Path:
    root = Path(ckpt_dir)
    if not root.is_dir():
        received = "a file" if root.exists() else "nothing there"
        raise CheckpointError(
            f"A checkpoint directory must exist to be read. Received: {root} ({received}). Give the directory of "
            "callbacks.Checkpoint."
        )
    return root


def read_checkpoint(path: Path, step: int) -> Checkpoint:
    """Returns the checkpoint in a directory; its `problem` says why it cannot be used, if that is so."""
    try:
        if (strange := foreign.strange_entry(path)) is not None:
            return Checkpoint(path, step, problem=f"{strange}, which keras_ddl does not read")
        state = foreign.read_json(path, STATE)
    except FileNotFoundError:
        return Checkpoint(path, step, problem=f"{STATE} is missing")
    except (ValueError, OSError) as error:
        return Checkpoint(path, step, problem=f"{STATE} cannot be read ({error})")
    if not digests.is_sealed(state):
        return Checkpoint(path, step, problem=f"{STATE} was altered after it was written (its SHA-256 differs)")
    if lacks := sorted(_ENTRIES - state.keys()):
        return Checkpoint(path, step, problem=f"{STATE} lacks {', '.join(lacks)}")
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
