"""Records the last complete checkpoint that this process knows of, for the message when a job fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_known: dict[str, Any] = {}


def note(path: Path, step: int, resume: bool) -> dict[str, Any] | None:
    """Records that the checkpoint of `step` is complete. Returns the record, or None if it was already known.

    `resume`: whether a restarted program continues from it.
    """
    checkpoint = {"path": str(path.absolute()), "step": step, "resume": resume}
    if checkpoint == _known:
        return None
    _known.update(checkpoint)
    return checkpoint


def known() -> dict[str, Any] | None:
    return dict(_known) if _known else None


def resume_hint(checkpoint: dict[str, Any]) -> str:
    """Returns a line that says how to resume from the checkpoint."""
    how = "start the same command again"
    if not checkpoint["resume"]:
        how += ", with resume=True in callbacks.Checkpoint"
    return f"The last checkpoint is {checkpoint['path']}. To continue from it, {how}."
