"""The last whole checkpoint that this process knows of: what to say of it when a job ends with an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keras_ddl.files.durable import write_whole

FILE = "checkpoint.json"  # in KERAS_DDL_RUN_DIR, for the launcher

_known: dict[str, Any] = {}


def note(path: Path, step: int, resume: bool, run_dir: str | None) -> None:
    """Notes that the checkpoint of `step` is whole; `resume`: whether the program goes on from it when started again.

    `run_dir`: where the launcher finds it, None without one. What cannot be told to the launcher is left untold.
    """
    found = {"path": str(path.absolute()), "step": step, "resume": resume}
    if found == _known:
        return
    _known.update(found)
    if run_dir is not None:
        text = json.dumps(_known)
        try:
            write_whole(Path(run_dir) / FILE, lambda part: Path(part).write_text(text), synced=False)
        except OSError:  # a full disk, of which the job fails anyway
            pass


def known() -> dict[str, Any] | None:
    """Returns what this process has noted last."""
    return dict(_known) if _known else None


def read(run_dir: Path) -> dict[str, Any] | None:
    """Returns what the process of `run_dir` has noted last; None for nothing."""
    try:
        found = json.loads((run_dir / FILE).read_bytes()[:4096])
        return {"path": str(found["path"]), "step": int(found["step"]), "resume": bool(found["resume"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def resume_hint(checkpoint: dict[str, Any]) -> str:
    """Returns what to type to go on from it, in one line."""
    how = "start the same command again"
    if not checkpoint["resume"]:
        how += ", with resume=True in callbacks.Checkpoint"
    return f"The last checkpoint is {checkpoint['path']}. To go on from it, {how}."
